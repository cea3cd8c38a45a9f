"""The server's side of connections: admission, requests, answers and statistics."""
