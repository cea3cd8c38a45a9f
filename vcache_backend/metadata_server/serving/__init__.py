"""The server's side of connections: who may connect, and what is answered."""
