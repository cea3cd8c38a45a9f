"""GPU and host memory for a KV cache that other processes can map."""
