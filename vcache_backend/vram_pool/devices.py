"""Names memory: a GPU, by its UUID, or this machine's host memory. Names are the same in every
process of the node.

`CUDA_VISIBLE_DEVICES` renumbers GPUs in each process, so a GPU's ordinal never leaves its
process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from vcache_backend.config import DEVICE_FORMS, HOST_DEVICE, is_device
from vcache_backend.errors import ConfigError, SegmentError
from vcache_backend.protocol.messages import Medium
from vcache_backend.vram_pool import cuda_driver
from vcache_backend.vram_pool.cuda_driver import Link


class Device(msgspec.Struct, frozen=True):
    """Memory that segments lie in and readers read from."""

    name: str
    """`GPU-…` (the UUID), `host` or `host:NAME`; the same in every process of the node."""
    medium: Medium
    ordinal: int | None = None
    """The GPU's CUDA ordinal in this process; for host memory, the ordinal of the GPU that reads
    the memory, or None."""

    def __str__(self) -> str:
        return self.name if self.ordinal is None else f"{self.name} (cuda:{self.ordinal})"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that this process sees. Sizes in bytes."""

    ordinal: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    shares_memory: bool
    """Whether it can hold segments (virtual memory management with POSIX fds)."""
    links: dict[str, Link]
    """By UUID of every other visible GPU, how kernels on this GPU reach the other GPU's memory."""


def resolve(spec: str, kv_device: str = "") -> Device:
    """The device that `pool.device` (`spec`) means in this process and thread. May start CUDA: a
    process that will fork must not call it.

    kv_device: torch's name of the device of the KV caches; empty if unknown. `auto` means this
    device, and this GPU reads a pool in host memory. Raises ConfigError: `spec` has no known form,
    this process does not see the GPU, or CUDA cannot be used."""
    if not is_device(spec):
        raise ConfigError(f"pool.device: {spec!r} is not a device; expected {DEVICE_FORMS}")
    if spec == "auto" and kv_device:
        spec = "host" if kv_device == "cpu" else kv_device
    if HOST_DEVICE.fullmatch(spec):
        return Device(
            spec, "host", resolve(kv_device).ordinal if kv_device.startswith("cuda") else None
        )
    name = spec.lower()
    if name in ("auto", "cuda"):
        current = current_gpu()
        if current is None and name == "auto":
            return Device("host", "host")
        if current is None:
            sees = "pool.device: cuda, but torch sees no GPU here"
            raise ConfigError(f"{sees}; run `vcache doctor`, or set pool.device: host")
        name = f"cuda:{current}"
    try:
        uuids = cuda_driver.load().uuids()
    except SegmentError as error:
        raise ConfigError(f"pool.device: {spec}: {error}") from error
    for ordinal, uuid in enumerate(uuids):
        if name in (f"cuda:{ordinal}", uuid.lower()):
            return Device(uuid, "cuda", ordinal)
    seen = ", ".join(uuids) or "none"
    lacks = f"{spec} is not visible to this process (see CUDA_VISIBLE_DEVICES)"
    raise ConfigError(f"pool.device: {lacks}; visible: {seen}")


def gpus() -> list[Gpu]:
    """Every GPU that this process sees, in the order of their ordinals. Raises SegmentError without
    cuda-bindings or driver.

    The call makes a CUDA context, for a moment, on each GPU where this process has no context."""
    driver, seen = cuda_driver.load(), []
    uuids = driver.uuids()
    for ordinal, uuid in enumerate(uuids):
        free, total = driver.memory(ordinal)
        others = [other for other in range(len(uuids)) if other != ordinal]
        seen.append(
            Gpu(
                ordinal=ordinal,
                uuid=uuid,
                name=driver.model(ordinal),
                total_bytes=total,
                free_bytes=free,
                shares_memory=driver.shares_memory(ordinal),
                links={uuids[other]: driver.link(ordinal, other) for other in others},
            )
        )
    return seen


def host_available(root: Path = Path("/")) -> int:
    """Bytes of host memory that are free in the machine and in every cgroup of this process."""
    meminfo = (root / "proc/meminfo").read_text()
    line = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(line[1]) * 1024 if line else 0
    return max(0, min([available, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """The free bytes of each cgroup of this process that has a limit. Cached files, such as
    weights, count as free: the kernel drops cached files before a cgroup runs out of memory."""
    listed = root / "proc/self/cgroup"
    own = re.search(r"^0::/(.*)", listed.read_text() if listed.exists() else "", re.MULTILINE)
    group = root / "sys/fs/cgroup" / (own[1] if own else "")
    for folder in (group, *group.parents):
        with suppress(OSError):
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            stat = (folder / "memory.stat").read_text()
            files = map(int, re.findall(r"^(?:in)?active_file (\d+)$", stat, re.MULTILINE))
            if limit != "max":
                yield int(limit) - used + sum(files)


def visible_ordinal(uuid: str) -> int | None:
    """The ordinal of a GPU in this process; None if this process does not see it. Raises
    SegmentError without a driver."""
    seen = map(str.lower, cuda_driver.load().uuids())
    return next((ordinal for ordinal, other in enumerate(seen) if other == uuid.lower()), None)


def current_gpu() -> int | None:
    """The GPU on which torch makes `cuda` tensors in this thread; None without a GPU."""
    import torch  # seconds to import, and `vcache doctor` works without it

    return torch.cuda.current_device() if torch.cuda.is_available() else None
