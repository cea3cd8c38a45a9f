"""The campaign of loads out of live KV caches: see `__main__`."""
