"""Sharing in place: what this instance publishes of its KV cache, and what it reads of others'."""
