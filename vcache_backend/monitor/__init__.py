"""The process that `server.metrics` starts, which shows the metadata server's statistics over HTTP.

The process is an ordinary client that asks the server every few seconds, so HTTP requests take no
time from the server's loop."""
