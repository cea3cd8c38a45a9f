"""Long tests of what happens when instances and the server are paused, stopped and killed."""
