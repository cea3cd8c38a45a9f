"""The data side: segments, the paged KV cache's geometry, copies between them, and this process's view of the pool."""
