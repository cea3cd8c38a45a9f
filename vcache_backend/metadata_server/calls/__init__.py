"""The client's side: a connection that is made again when lost, and its requests."""
