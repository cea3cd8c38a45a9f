"""Moves KV: a worker's session with the server, chunk keys, loads and stores."""
