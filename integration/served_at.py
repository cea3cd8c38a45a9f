"""Where users reach the vLLM that this process is part of, as the server's status names it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_DEFAULT = "8000"
"""The port of vLLM's API server if it is given none."""


def served_at(data_parallel_rank: int | None = None, command: Sequence[str] | None = None) -> str:
    """The port of vLLM's API server, such as `:8000`, or `:8000 rank 1` for a data parallel rank; empty if there is none, or if it is
    not on the command line. command: of the API server, which its engine's processes inherit; None: this process's."""
    words = list(sys.argv if command is None else command)
    port = _DEFAULT if words and (words[0].endswith("api_server.py") or "serve" in words[1:2]) else ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--port" or word.startswith("--port="):
            port = following if word == "--port" else word.partition("=")[2]
    rank = "" if data_parallel_rank is None else f" rank {data_parallel_rank}"
    return f":{port}{rank}" if port.isdigit() else ""
