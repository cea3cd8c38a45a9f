"""Taking memory back from a segment while it is read: how long `vcache segment resize` takes, and how long readers wait meanwhile."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import MAX_SLOTS, ChunkKey, Medium
from vcache_backend.vram_pool import devices, segment
from vcache_backend.vram_pool.devices import Device

from .metadata import key
from .processes import PATIENT, metadata_server
from .results import Row, load, percentile, row

GIB, CHUNK_BYTES = 1 << 30, 2 << 20
KEPT, WHOLE = 4 * GIB, 12 * GIB
"""Bytes. In a segment of WHOLE bytes the first 2 × KEPT are filled, the first KEPT freed again, and then all but KEPT taken back."""
SECONDS = 5.0
_MADV_POPULATE_WRITE = 23


def run() -> list[Row]:
    """Half a minute, and 8 GiB of host memory; on a GPU as long again, and 16 GiB of it."""
    rows = _of(Device("host", "host"))
    return rows + _of(devices.resolve("cuda:0")) if torch.cuda.is_available() else rows


def _of(device: Device) -> list[Row]:
    count, on_host = KEPT // CHUNK_BYTES, device.medium == "host"
    near = device.name, device.medium
    with metadata_server() as path, Client(path, PATIENT, *near) as client, segment.create(device, WHOLE) as owned:
        client.add_segment(owned.info, owned.fd)
        if on_host:
            mmap.mmap(owned.fd, WHOLE).madvise(_MADV_POPULATE_WRITE, 0, 2 * KEPT)
        keys = [key(number) for number in range(2 * count)]
        for start in range(0, len(keys), MAX_SLOTS):
            stored = client.commit(client.reserve(keys[start : start + MAX_SLOTS], CHUNK_BYTES).reservation)
            assert stored == len(keys[start : start + MAX_SLOTS]), f"{stored} chunks stored"
        client.remove(keys[:count])
        times, over = list[float](), threading.Event()
        reader = threading.Thread(target=_read, args=(path, near, keys[count : count + 64], times, over))
        reader.start()
        time.sleep(SECONDS)
        began, rest = time.perf_counter(), len(times)
        command = [sys.executable, "-m", "vcache_backend.cli", "segment", "resize", owned.id, str(KEPT), "--socket", str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert not ran.returncode, ran.stderr
        said = ran.stdout
        seconds = time.perf_counter() - began
        over.set()
        reader.join()
        at_rest, meanwhile = times[:rest], times[rest:]
        assert f"{count:,} chunks moved, 0 forgotten" in said, said
        assert sum(info.nbytes - info.given_back for info in client.list_segments()) == KEPT, said
    memory, suffix = ("host memory", "") if on_host else ("a GPU's memory", "_vram")
    what = f"of 12 GiB of {memory} 8 given back, 4 GiB of chunks of 2 MiB moved; {load()}"
    reads = "a lease on 64 chunks and its end"
    p99s = percentile(meanwhile, 99), percentile(at_rest, 99)
    return [
        row(f"give_back_8_gib{suffix}_s", "s", seconds, 0.0, what=what),
        row(f"give_back_reads{suffix}_p99_ms", "ms", *p99s, what=f"{reads}, p99; at rest"),
        row(f"give_back_reads{suffix}_p50_ms", "ms", meanwhile, at_rest, what=f"{reads}; at rest"),
    ]


def _read(path: Path, near: tuple[str, Medium], keys: list[ChunkKey], times: list[float], over: threading.Event) -> None:
    """One read every other millisecond: how long each took, in ms."""
    with Client(path, PATIENT, *near) as client:
        while not over.wait(0.002):
            began = time.perf_counter()
            client.release(client.acquire(keys).lease)
            times.append((time.perf_counter() - began) * 1e3)
