"""The error for a request that cannot be granted."""

from __future__ import annotations


class Refuse(Exception):
    """The request cannot be granted. The text goes to the client, which keeps its connection."""
