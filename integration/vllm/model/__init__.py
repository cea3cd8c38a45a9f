"""Reads vLLM and its model: version, block tables, shape of the KV cache, weights."""
