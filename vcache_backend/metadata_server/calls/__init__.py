"""The client's side of a connection: a socket, and what reconnects by itself."""
