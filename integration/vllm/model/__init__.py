"""What vLLM and its model are: versions, block tables, the shape of the KV cache, the weights."""
