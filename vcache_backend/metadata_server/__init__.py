"""The metadata server: the pool's directory and tables, instances that share in place. No torch, no CUDA."""
