"""Copies between paged KV caches and slots: geometry, plans, a kernel with a reference, copiers."""
