"""The address of this process's vLLM for users, for the server's status."""

from __future__ import annotations

import sys
from typing import Any

_DEFAULT = "8000"
"""The default port of vLLM's API server."""
_ELSEWHERE = ("--config", "--headless", "--uds")
"""Options under which the API server may have another port, or none."""


def served_at(vllm_config: Any) -> str:
    """The port of vLLM's API server, such as `:8000`, or `:8000 rank 1` for a data parallel rank;
    empty without a port on the command line, which the engine's processes inherit."""
    words, parallel = sys.argv, vllm_config.parallel_config
    served = bool(words) and (words[0].endswith("api_server.py") or "serve" in words[1:2])
    port = _DEFAULT if served and not any(word.startswith(_ELSEWHERE) for word in words) else ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--port" or word.startswith("--port="):
            port = following if word == "--port" else word.partition("=")[2]
    rank = f" rank {parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
    return f":{port}{rank}" if port.isdigit() else ""
