"""What the package logs, in vLLM's log."""

from __future__ import annotations

import logging


def join_vllm() -> None:
    """Let the rest of the package be logged as vLLM's lines are, with time and process. Its loggers lie beside vLLM's, which are all that
    vLLM configures: the others' warnings would come bare, and the rest not at all."""
    ours, theirs = logging.getLogger("vcache_backend"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
