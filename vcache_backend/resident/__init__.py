"""Sharing in place: generation tables, and other instances' KV caches mapped into this process."""
