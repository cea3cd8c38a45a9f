"""Sharing in place: which blocks of a KV cache hold what (generations), and other instances'
KV caches mapped into this process.
"""
