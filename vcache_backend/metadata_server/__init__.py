"""The metadata server: the pool's directory, and instances that share in place. No torch."""
