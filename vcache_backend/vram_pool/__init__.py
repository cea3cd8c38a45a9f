"""The data side: segments, the geometry of paged KV caches, copies between both, and this process's
view of the pool."""
