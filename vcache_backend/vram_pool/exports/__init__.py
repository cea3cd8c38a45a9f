"""Memory for a KV cache that other processes can map: of a GPU, and of the host."""
