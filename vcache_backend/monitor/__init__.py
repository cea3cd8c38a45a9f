"""The process that `server.metrics` starts: it shows the metadata server's statistics over HTTP.

It is an ordinary client of the server and asks every few seconds, so HTTP requests take no time
from the server's loop."""
