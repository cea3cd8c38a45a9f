"""Moving KV: sessions with the server, keys, loads and stores of chunks."""
