"""What `server.metrics` starts: a process beside the metadata server that shows its statistics over HTTP.

A client of the server like any other, so that nobody who asks it, however often or slowly, takes time from the server's loop.
"""
