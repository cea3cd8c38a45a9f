"""Copies between paged KV caches and slots: geometry, a kernel, copiers with its reference."""
