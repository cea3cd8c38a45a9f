"""Sharing in place: which blocks of a KV cache hold what (generations, pins), and other instances'
KV caches mapped into this process.
"""
