"""Puts the package's log lines into vLLM's log."""

from __future__ import annotations

import logging


def join_vllm() -> None:
    """Give the package's logger vLLM's handlers and level, unless it has handlers of its own.

    vLLM configures only its own loggers: otherwise our warnings would lack time and process, and
    lower levels would not appear."""
    ours, theirs = logging.getLogger("vcache_backend"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
