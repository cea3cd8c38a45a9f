"""The demo: its content tells mistakes apart, a wrong byte is found and named, and nothing is left
running.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
import torch
from processes import Child, eventually

from vcache_backend import demo
from vcache_backend.config import Config, EngineConfig
from vcache_backend.demo.cache import Fault, PagedCache
from vcache_backend.demo.content import Shape, block_digests, content
from vcache_backend.demo.workers import DemoError
from vcache_backend.errors import ConfigError

SHAPE = Shape(layers=3, kv_heads=2, head_dim=8, block_size=4)
CPU = torch.device("cpu")


def test_all_later_blocks_and_no_earlier_one_change_with_one_token() -> None:
    tokens = np.arange(40)
    before = block_digests(tokens, 4)
    tokens[17] += 1
    assert (block_digests(tokens, 4) != before).tolist() == [False] * 4 + [True] * 6


def bytes_of(digest: int, layer: int) -> torch.Tensor:
    return (
        content(torch.tensor([digest]), layer, SHAPE.row_words)
        .contiguous()
        .view(torch.uint8)
        .flatten()
    )


def test_every_byte_depends_on_the_prefix_and_on_the_layer() -> None:
    for variants in (
        [bytes_of(digest, 1) for digest in range(64)],
        [bytes_of(77, layer) for layer in range(64)],
    ):
        assert min(len(column.unique()) for column in torch.stack(variants).T) > 40


# ---- the paged cache and its check


def prompt_in_cache(retrieved: int = 3) -> tuple[PagedCache, torch.Tensor, torch.Tensor]:
    """Five blocks of prompt at odd places, the first `retrieved` of them filled as a retrieve
    would.
    """
    cache = PagedCache(SHAPE, 16, CPU, worker=0)
    digests = torch.from_numpy(block_digests(np.arange(20), SHAPE.block_size))
    places = torch.tensor([11, 2, 7, 0, 15])
    cache.prefill(places[:retrieved], digests[:retrieved])
    return cache, places, digests


@pytest.mark.parametrize("kv", [0, 1])
@pytest.mark.parametrize(("layer", "token"), [(0, 0), (1, 5), (2, 11)])
def test_one_wrong_byte_is_found_with_its_layer_and_token(kv: int, layer: int, token: int) -> None:
    cache, places, digests = prompt_in_cache()
    block = int(places[token // 4])
    cache.kvcaches[layer][kv, block, token % 4].view(torch.uint8)[1, 3] ^= 1
    assert cache.faults(places, digests, 3) == [Fault("wrong", layer, block, token, 1)]


@pytest.mark.parametrize(
    ("block", "token", "said"), [(0, 14, "layer 1, token 14"), (5, -1, "layer 1, cache block 5")]
)
def test_a_byte_written_elsewhere_is_stray(block: int, token: int, said: str) -> None:
    """Behind the retrieved tokens, or into a block of nobody."""
    cache, places, digests = prompt_in_cache()
    assert cache.faults(places, digests, 3) == []
    cache.kvcaches[1][0, block, 2].view(torch.uint8)[0, 0] ^= 1
    fault = Fault("stray", 1, block, token, 1)
    assert cache.faults(places, digests, 3) == [fault]
    assert str(fault) == f"1 stray byte in {said}"


# ---- the whole thing, with real processes


def start_demo(folder: Path, *options: str) -> Child:
    return Child(
        [sys.executable, "-m", "vcache_backend.cli", "demo", "--json", *options], TMPDIR=str(folder)
    )


def children_of(pid: int) -> list[Path]:
    """Of the process and of its children; each as its folder in /proc."""
    try:
        found = [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []
    return [Path(f"/proc/{child}") for child in found] + [
        path for child in found for path in children_of(child)
    ]


def test_what_one_worker_stores_the_other_retrieves_and_a_changed_byte_is_found(
    tmp_path: Path,
) -> None:
    with start_demo(tmp_path) as child:
        status, said = child.wait(100)
    assert status == 0, said
    result = json.loads(said[said.index("{") :])
    assert (result["ok"], result["wrong_bytes"], result["problems"]) == (True, 0, [])
    assert result["chunks_retrieved"] == result["chunks_stored"] == 64
    assert result["bytes_checked"] == 64 * result["chunk_bytes"]
    assert result["control"].startswith("1 wrong byte in layer ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "sigkill"])
def test_a_demo_that_is_ended_leaves_no_process(how: signal.Signals, tmp_path: Path) -> None:
    # It must not be through before this test has seen that it has begun.
    long, folder = tmp_path / "long.yaml", tmp_path / "folder"
    long.write_text("engine: {chunk_size: 4096}\n")
    folder.mkdir()
    with start_demo(folder, "--config", str(long)) as child:
        # A server, two workers, and what multiprocessing runs beside them.
        eventually(lambda: len(children_of(child.pid)) == 4, 100)
        started = children_of(child.pid)
        child.signal(how)
        status, said = child.wait(100)
    assert status == (130 if how is signal.SIGINT else -signal.SIGKILL), said
    assert how is signal.SIGKILL or "Traceback" not in said
    eventually(lambda: not any(path.exists() for path in started), 100)
    assert how is signal.SIGKILL or not list(folder.iterdir())


def test_a_worker_that_fails_is_reported_with_its_words() -> None:
    nowhere = f"GPU-{UUID(int=7)}"
    with pytest.raises(DemoError, match=rf"(?s)worker 0 failed.*pool.device: {nowhere}"):
        demo.play(Config(), [nowhere])


def test_a_chunk_size_that_blocks_do_not_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.chunk_size: 250 is not a multiple of .* 16"):
        demo.play(Config(engine=EngineConfig(chunk_size=250)), ["host:0", "host:1"])
