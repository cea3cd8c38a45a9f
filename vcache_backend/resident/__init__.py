"""Chunks that lie in an instance's own KV cache: who holds which bytes now, and the KV caches of others as this process sees them."""
