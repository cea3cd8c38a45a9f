"""The metadata server: directory, allocator, leases, fds, journal. No torch, no CUDA; no data
passes through it.
"""
