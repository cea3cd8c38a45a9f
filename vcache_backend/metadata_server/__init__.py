"""The metadata server: directory, allocator, leases, fds, ledger. No torch, no CUDA, no KV."""
