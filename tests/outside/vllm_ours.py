"""vLLM's own tests of connectors, with VCacheConnector where they take one of vLLM's.

The connectors that its tests name without meaning them are `NixlConnector` (the default of their
helper) and `ExampleConnector`; whoever asks the factory for one of these gets ours, with settings
for a pool of its own. Nothing else of vLLM is changed. What a worker would say it holds is made up,
so that ours looks for chunks in a pool; it has none. The model is the configuration of
`facebook/opt-125m`, which lies where the tests run: no weights are needed. They have a server of
their own, and it is noted in which tests ours took part.

A pytest plugin. It imports nothing of ours before the suite does."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SECONDS = 30.0
FOLDER = Path(tempfile.mkdtemp(prefix="vcache-outside-"))
SOCKET = FOLDER / "vcache.sock"
STAND_IN_FOR = ("NixlConnector", "ExampleConnector")
BLOCK = 16
SETTINGS: dict[str, Any] = {"server": {"socket": str(SOCKET)}}
SETTINGS |= {"pool": {"device": "host", "segment_bytes": "16 MiB"}, "engine": {"chunk_size": BLOCK}}
SETTINGS |= {"connector": {"min_hit_tokens": BLOCK}}
WORKER: dict[str, Any] = {"pp_rank": 0, "tp_rank": 0, "kv_layout": "none", "dtype": "float16"}
WORKER |= {"layers": 1, "parts": 1, "page_bytes": 1024, "block_size": BLOCK, "chunk_bytes": 1024}
WORKER |= {"attention": "none", "layer_names": "none"}
OPT_125M = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768}
OPT_125M |= {"word_embed_proj_dim": 768, "ffn_dim": 3072, "num_attention_heads": 12}
OPT_125M |= {"num_hidden_layers": 12, "vocab_size": 50272, "max_position_embeddings": 2048}
OPT_125M |= {"torch_dtype": "float16"}


_said: dict[str, list[Any]] = {}
_server: list[subprocess.Popen[bytes]] = []
_made: list[Any] = []
"""The connectors of the present test."""


def _die_with_parent() -> None:
    """Also if the suite is killed, being too slow."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def pytest_configure(config: pytest.Config) -> None:
    log = FOLDER / "server.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "vcache_backend", "serve", "--socket", str(SOCKET)]
        streams = {"stdout": out, "stderr": subprocess.STDOUT}
        _server.append(subprocess.Popen(command, **streams, preexec_fn=_die_with_parent))
    deadline = time.monotonic() + SECONDS
    while not SOCKET.exists():
        if _server[0].poll() is not None or time.monotonic() > deadline:
            pytest.exit(f"no metadata server: {log.read_text()}", 3)
        time.sleep(0.02)


def pytest_unconfigure(config: pytest.Config) -> None:
    for server in _server:
        server.kill()
        server.wait()
    shutil.rmtree(FOLDER, ignore_errors=True)
    Path(os.environ["VCACHE_OUTSIDE_RESULTS"]).write_text(json.dumps(_said))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _said[item.nodeid] = ["passed", False, ""]
    try:
        return (yield)
    finally:
        _said[item.nodeid][1] = bool(_made)
        # Otherwise the next test, with the same prompts, waits for what this one would compute.
        while _made:
            if hasattr(made := _made.pop(), "_undo"):
                made.shutdown()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed":
        said = report.longreprtext.strip().splitlines() if report.outcome == "failed" else []
        _said[report.nodeid][0] = report.outcome
        errors = (line for line in reversed(said) if line.startswith("E  "))
        _said[report.nodeid][2] = next(errors, "")[:300]


def pytest_sessionstart(session: pytest.Session) -> None:
    model = Path("facebook/opt-125m")
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(OPT_125M))
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector

    from vcache_backend.integration.vllm import connector
    from vcache_backend.integration.vllm.connector import VCacheConnector
    from vcache_backend.integration.vllm.model.spec import ShardSpec

    class Ours(VCacheConnector):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            _made.append(self)
            super().__init__(*arguments)
            if self._half is not None:
                # There is no worker in these tests to say what it holds; without one nothing would
                # be looked for.
                self._scheduler.context.note({(0, 0): ShardSpec(**WORKER)}, {})

    read = connector.over_file
    connector.over_file = lambda extra_config: read(SETTINGS)
    for name in STAND_IN_FOR:
        KVConnectorFactory._registry[name] = lambda: Ours
    # Their recording connector wraps one that it imports by name.
    example_connector.ExampleConnector = Ours
    if parallel_state._PP is None:
        # A worker of vLLM has one; the tests make a tensor parallel group only.
        parallel_state._PP = SimpleNamespace(rank_in_group=0, world_size=1)
