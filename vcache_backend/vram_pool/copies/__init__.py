"""Copies between paged KV caches and slots: plans, kernels with a reference each, copiers."""
