"""The port by which people know an instance, read from the command line of vLLM's API server."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from vcache_backend.integration.around_vllm import served_at


@pytest.mark.parametrize(
    ("command", "rank", "said"),
    [
        ("/usr/bin/vllm serve M", None, ":8000"),
        ("/usr/bin/vllm serve M --port 8001", 1, ":8001 rank 1"),
        ("/site/vllm/entrypoints/openai/api_server.py --port=9000 --model M", None, ":9000"),
        ("/usr/bin/vllm serve --config M.yaml", None, ""),
        ("/usr/bin/vllm serve --config=M.yaml --port 8001", None, ":8001"),
        ("/usr/bin/vllm serve M --headless", None, ""),
        ("/usr/bin/vllm serve M --uds /tmp/vllm.sock", None, ""),
        ("program.py", None, ""),
        ("program.py --port", None, ""),
        ("vllm serve --port \x1b[2J", None, ""),
    ],
)
def test_an_instance_is_named_by_its_port(
    monkeypatch: pytest.MonkeyPatch, command: str, rank: int | None, said: str
) -> None:
    monkeypatch.setattr(sys, "argv", command.split(" "))
    ranks = SimpleNamespace(data_parallel_rank=rank or 0, data_parallel_size=1 + (rank or 0))
    assert served_at(SimpleNamespace(parallel_config=ranks)) == said
