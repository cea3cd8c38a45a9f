"""What the server's rooms raise where a request cannot be granted."""

from __future__ import annotations


class Refuse(Exception):
    """The request cannot be granted; the text goes to the client, which keeps its connection."""
