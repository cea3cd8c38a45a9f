"""`vllm serve` with our connector on the CPU, as users start it: wishes in the body of a request, and our metrics."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any
from urllib.request import Request, urlopen

import pytest
from processes import Child, eventually
from vllm_cases import ANSWER_SECONDS, BLOCK, CHUNK, QUIET, START_SECONDS, TOKEN_BYTES, Node, missing, new_tokens, node

NEEDED = ("watchfiles", "prometheus-fastapi-instrumentator", "model-hosting-container-standards")
WHY_NOT = missing(NEEDED)
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "vLLM is here"), pytest.mark.timeout(300)]


@contextmanager
def serving(here: Node) -> Iterator[str]:
    """The address of a server whose front end and engine are processes of their own."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    settings = {
        "model": str(here.model),
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": port,
        "dtype": "bfloat16",
        "block-size": str(BLOCK),
        "kv-cache-memory-bytes": str(4096 * TOKEN_BYTES),
        "max-model-len": "1024",
        "max-num-seqs": "4",
        "kv-transfer-config": json.dumps(here.transfer()),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"]
    command += [word for name, value in settings.items() for word in (f"--{name}", value)]
    environment = {name: value for name, value in QUIET.items() if value is not None}
    # The mode of developers has the address that resets the cache.
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1", "TRITON_INTERPRET": "0"}
    with Child(command, **environment) as child:
        child.expect("Application startup complete", START_SECONDS)
        # It says so before it listens.
        eventually(lambda: listens(int(port)), ANSWER_SECONDS)
        yield f"http://127.0.0.1:{port}"
        child.signal(signal.SIGTERM)
        child.wait(ANSWER_SECONDS)


def listens(port: int) -> bool:
    with socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def complete(address: str, tokens: list[int], **wishes: Any) -> tuple[list[int], int]:
    """The tokens of the answer, and how many of the prompt were not computed."""
    asked = {"model": "tiny", "prompt": tokens, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps(asked | {"detokenize": False, "kv_transfer_params": {"vcache": wishes}}).encode()
    request = Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=ANSWER_SECONDS) as answer:
        said = json.load(answer)
    details = said["usage"]["prompt_tokens_details"] or {}
    return said["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def counted(address: str, series: str) -> float:
    """A series of the server's metrics: its name, with some of its labels, such as `name:label="value"`."""
    name, _, label = series.partition("{")
    with urlopen(f"{address}/metrics", timeout=ANSWER_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    assert found, f"no {series}"
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_wishes_come_with_the_body_and_metrics_say_what_was_loaded(tmp_path: Path) -> None:
    tokens = new_tokens(4 * CHUNK + 1)
    with node(tmp_path) as here, serving(here) as address:
        reset = Request(f"{address}/reset_prefix_cache", method="POST")
        computed, cached = complete(address, tokens, store=False)
        assert cached == 0
        urlopen(reset, timeout=ANSWER_SECONDS).close()
        assert complete(address, tokens) == (computed, 0)
        eventually(lambda: here.stats().chunks == 4)
        assert counted(address, 'vllm:vcache_loaded_tokens_total{tier="host"') == 0
        urlopen(reset, timeout=ANSWER_SECONDS).close()
        assert complete(address, tokens, load=False) == (computed, 0)
        urlopen(reset, timeout=ANSWER_SECONDS).close()
        assert complete(address, tokens, consume_once=True) == (computed, 4 * CHUNK)
        assert here.stats().chunks == 0
        loaded = 4 * CHUNK
        eventually(lambda: counted(address, 'vllm:vcache_loaded_tokens_total{tier="host"') == loaded)
        assert counted(address, 'vllm:vcache_loaded_bytes_total{tier="host"') == loaded * TOKEN_BYTES
        assert counted(address, "vllm:vcache_lookup_hit_tokens_total") == loaded
        assert counted(address, "vllm:vcache_load_seconds_count") == 1
        assert counted(address, "vllm:vcache_failures_total") == 0
