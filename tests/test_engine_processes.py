"""Two worker processes share KV through a real server, on host memory and over NVLink; then one is
killed and its successor reads on.

Every retrieval goes into poisoned blocks and is checked byte by byte. On GPUs the KV is still being
computed when it is stored and is overwritten right behind it, and what is retrieved is read at once
by the next kernels."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from engine_cases import Worker, node
from kv_cases import FLASH, MLA, Arrangement, Cache, Sizes, places, prompt
from processes import IN_A_CONTAINER, PATIENT, QUICK, Apart, containers, eventually

from vcache_backend.vram_pool import devices

CHUNK_SIZE = 256
GROUP = 4242
LARGE = Sizes(layers=8, heads=8, dim=128, blocks=320)


class Where(NamedTuple):
    """devices: what the two workers lend memory of. kv: where their KV caches lie, if not there."""

    devices: tuple[str, str]
    sizes: Sizes = LARGE
    kv: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        return " ".join(one for one in (self.devices[0], *self.kv) if one)


HOST = Where(("host:a", "host:b"), Sizes(layers=4, heads=2, dim=64, blocks=96))
GPUS = Where(("cuda:0", "cuda:1"))
ONE_GPU = Where(HOST.devices, kv=("cuda:0", "cuda:0"))
TWO = Where(HOST.devices, kv=("cuda:0", "cuda:1"))
"""Pools in host memory, KV caches on GPUs."""
# Segments in locked memory are noticed with the heartbeat.
CLIENT = msgspec.structs.replace(PATIENT, server_uid=0, heartbeat_seconds=QUICK.heartbeat_seconds)


def on(where: Where, *arrangements: Arrangement, marks: Any = ()) -> list[Any]:
    return [
        pytest.param(where, arrangement, marks=marks, id=f"{where} {arrangement.name}")
        for arrangement in arrangements
    ]


def brings(worker: Worker, tokens: torch.Tensor, seed: int) -> None:
    answer = worker.ask("retrieve", tokens, places(worker.setup.sizes, len(tokens), seed))
    assert answer == (len(tokens), True)


def share(
    folder: Path,
    where: Where,
    arrangement: Arrangement,
    visible: tuple[str, str] = ("", ""),
    isolated: bool = False,
) -> None:
    """isolated: the server and the workers in containers of their own, the workers' users let
    in by the server.
    """
    sizes = where.sizes
    count = sizes.blocks * sizes.block_size * 4 // 5 // CHUNK_SIZE * CHUNK_SIZE
    token_bytes = Cache(arrangement, sizes._replace(blocks=1)).token_bytes
    with node(folder, CLIENT) as here:
        here.serve(**({"within": IN_A_CONTAINER, "allow_uids": [1001, 1002]} if isolated else {}))

        def start(number: int) -> Worker:
            room = max(4 * count * token_bytes, 1 << 20)
            apart = Apart(1000 * number, 1001 + number, GROUP) if isolated else None
            more = {"visible": visible[number], "kv_device": where.kv[number], "apart": apart}
            return here.worker(where.devices[number], room, arrangement, sizes, CHUNK_SIZE, **more)

        first, second = start(0), start(1)
        for worker in (first, second):
            eventually(lambda worker=worker: worker.ask("mapped") == 2)
        if isolated:
            assert first.ask("lives_in") != second.ask("lives_in")
        segments = here.client().list_segments()
        for family, (writer, reader) in enumerate([(first, second), (second, first)], start=1):
            tokens = prompt(count, family)
            assert reader.ask("lookup", tokens) == 0
            writer.ask("store", tokens, places(sizes, count, family))
            assert writer.ask("flush")
            assert writer.ask("stats")["tokens"]["stored"] == reader.ask("lookup", tokens) == count
            for seed in (11, 12):
                brings(reader, tokens, seed)
            assert reader.ask("stats")["bytes"]["peer"] == 2 * count * token_bytes

        half = count // 2 // CHUNK_SIZE * CHUNK_SIZE
        for known, tokens in (
            (0, prompt(count, 77)),
            (half, torch.cat([prompt(half, 1), prompt(count - half, 78)])),
        ):
            answer = second.ask("retrieve", tokens, places(sizes, count, 4))
            assert answer == (known, True)

        first.ask("store", prompt(count, 3), places(sizes, count, 5))
        assert first.ask("flush")
        first.kill()
        successor = start(0)
        eventually(lambda: successor.ask("mapped") == 2)
        listed = {segment.id for segment in here.client().list_segments()}
        assert listed == {segment.id for segment in segments}
        for worker in (successor, second):
            brings(worker, prompt(count, 3), 6)


APART = os.getuid() == 0 and not containers()


@pytest.mark.skipif(not APART, reason=f"needs root and namespaces of its own: {containers()}")
def test_two_containers_of_two_users_share_every_byte_and_nothing_but_the_sockets_folder() -> None:
    with TemporaryDirectory() as open_to_all:
        Path(open_to_all).chmod(0o711)
        share(Path(open_to_all) / "folder", HOST, FLASH, isolated=True)


TWO_GPUS = [pytest.mark.gpu(count=2), pytest.mark.timeout(300)]
A_GPU = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("where", "arrangement"),
    on(HOST, MLA, marks=pytest.mark.skipif(APART, reason="is tested in containers"))
    + on(GPUS, FLASH, MLA, marks=TWO_GPUS)
    + on(ONE_GPU, FLASH, MLA, marks=A_GPU)
    + on(TWO, FLASH, marks=TWO_GPUS),
)
def test_two_processes_share_every_byte_and_a_successor_finds_them(
    tmp_path: Path, where: Where, arrangement: Arrangement
) -> None:
    share(tmp_path, where, arrangement)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize(
    "seen", [("{0}", "{1}"), ("{0},{1}", "{1},{0}")], ids=["one each", "numbered differently"]
)
def test_two_processes_that_call_their_own_gpu_cuda_0_share_every_byte(
    tmp_path: Path, seen: tuple[str, str]
) -> None:
    """As two instances with a `CUDA_VISIBLE_DEVICES` of their own do, which may not even name the
    other's GPU.
    """
    names = [devices.resolve(f"cuda:{ordinal}").name for ordinal in range(2)]
    visible = (seen[0].format(*names), seen[1].format(*names))
    share(tmp_path, Where(("cuda:0", "cuda:0")), FLASH, visible)
