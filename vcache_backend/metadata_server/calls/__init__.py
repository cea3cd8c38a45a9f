"""The client's side of a connection: a socket, and a channel that reconnects by itself."""
