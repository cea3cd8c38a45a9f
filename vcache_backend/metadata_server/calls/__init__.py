"""The client's side: a connection that reconnects by itself, and its requests."""
