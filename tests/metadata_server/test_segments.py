"""Segments of host memory: what outlives whom, what is refused, and that nothing is left behind.
Real memfds and processes.
"""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from vcache_backend import seals
from vcache_backend.errors import ConfigError, SegmentError
from vcache_backend.protocol.messages import SegmentId, SegmentInfo
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.regions import OwnedSegment, create, map_segment

GIB = 1 << 30

HOST = Device("host", "host")
NBYTES = 1 << 20


def open_fds() -> int:
    """Of this process. What an earlier test left to a thread may go at any time: later there may be
    fewer.
    """
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Mappings of vcache's memfds in this process."""
    return sum("memfd:vcache-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def left_behind(action: Callable[[], object], cycles: int) -> tuple[int, int]:
    """(fds, mappings) that `cycles` runs of `action` leave in this process."""
    action()
    gc.collect()
    before = open_fds(), mappings()
    for _ in range(cycles):
        action()
    gc.collect()
    return max(open_fds() - before[0], 0), max(mappings() - before[1], 0)


@pytest.fixture
def owned() -> Iterator[OwnedSegment]:
    with create(HOST, NBYTES) as segment:
        yield segment


# ---- what a segment is


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 60])
def test_an_impossible_size_is_refused(nbytes: int) -> None:
    with pytest.raises(SegmentError, match=f"{nbytes:,} B"):
        create(HOST, nbytes)


# ---- what is refused


@contextmanager
def forged(kind: str) -> Iterator[int]:
    if kind == "plain":
        with tempfile.TemporaryFile(dir="/var/tmp") as file:
            os.ftruncate(file.fileno(), NBYTES)
            yield file.fileno()
        return
    if kind == "device":
        fd = os.open("/dev/null", os.O_RDWR)
    else:
        huge = os.MFD_HUGETLB if kind == "huge" else 0
        fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING | huge)
    try:
        if kind != "device":
            os.ftruncate(fd, {"small": 4096, "huge": 1 << 30}.get(kind, NBYTES))
            more = fcntl.F_SEAL_WRITE if kind == "frozen" else 0
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0 if kind == "unsealed" else seals.RESIZING | more)
        if kind == "read-only":
            readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            os.close(fd)
            fd = readable
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("plain", r"plain file of 1,048,576 B|it has 0x1, needs 0x7"),
        ("device", r"not a memfd but crw"),
        ("small", r"holds 4,096 B but the segment is said to have 1,048,576 B"),
        ("unsealed", r"other seals .it has 0x0, needs 0x7"),
        ("frozen", r"Operation not permitted"),
        ("read-only", r"Permission denied"),
        ("huge", r"huge pages: .* SIGBUS"),
    ],
)
def test_a_forged_fd_is_refused_with_figures_and_leaves_nothing(kind: str, message: str) -> None:
    info = SegmentInfo(SegmentId("0123456789ab"), "host", "host", NBYTES)
    with forged(kind) as fd:
        before = open_fds()
        with pytest.raises(SegmentError, match=f"segment 0123456789ab of host: .*{message}"):
            map_segment(info, fd, HOST)
        assert open_fds() <= before


def test_a_gpu_does_not_map_host_memory_and_a_host_no_gpu_memory(owned: OwnedSegment) -> None:
    gpu = Device("GPU-00000000-0000-0000-0000-000000000000", "cuda", 0)
    with pytest.raises(SegmentError, match=r"host memory of host: GPU-0.* cannot map that"):
        map_segment(owned.info, owned.fd, gpu)
    of_gpu = msgspec.structs.replace(owned.info, device=gpu.name, medium="cuda")
    with pytest.raises(SegmentError, match="cuda memory of GPU-0.*: host cannot map that"):
        map_segment(of_gpu, owned.fd, HOST)


# ---- closing


def test_close_may_be_called_again_and_what_is_closed_says_so(owned: OwnedSegment) -> None:
    number, mapped = owned.fd, map_segment(owned.info, owned.fd, HOST)
    for segment in (owned, mapped):
        segment.close()
        # The number may be another file's by now: closing again must not close that.
        replacement = os.open("/dev/null", os.O_RDONLY)
        segment.close()
        os.fstat(replacement)
        os.close(replacement)
        with pytest.raises(SegmentError, match=f"segment {segment.id} is closed"):
            _ = segment.fd
    assert number >= 0
    with pytest.raises(SegmentError, match="is closed"):
        _ = mapped.whole


def test_a_tensor_outlives_its_segment_and_the_mapping_goes_with_it(owned: OwnedSegment) -> None:
    before = open_fds(), mappings()
    mapped = map_segment(owned.info, owned.fd, HOST)
    view = mapped.whole[:NBYTES]
    part = view[10:20].view(torch.int16)
    mapped.close()
    del view, mapped
    part.fill_(257)
    assert part.tolist() == [257] * 5
    assert mappings() == before[1] + 1
    del part
    assert (open_fds() <= before[0], mappings()) == (True, before[1])


# ---- devices on a machine without a GPU


@pytest.mark.parametrize("spec", ["", "host:a/b", "cuda:-1", "GPU-123"])
def test_an_unknown_device_is_a_configuration_error_that_lists_the_forms(spec: str) -> None:
    forms = "auto, host, host:NAME .*, cuda, cuda:N or a GPU's UUID"
    with pytest.raises(ConfigError, match=rf"pool\.device: .*expected {forms}"):
        devices.resolve(spec)


# ---- how much host memory there is


@pytest.mark.parametrize(
    ("limit", "cache", "left"),
    [("max", 0, 64 * GIB), (8 * GIB, 0, GIB), (8 * GIB, 3 * GIB, 4 * GIB)],
)
def test_a_cgroup_has_what_its_limit_leaves_and_what_it_gives_back_of_files(
    tmp_path: Path, limit: object, cache: int, left: int
) -> None:
    """A service's cgroup lies below the root, whose file cache is the weights that it has read."""
    group = tmp_path / "sys/fs/cgroup/system.slice/vllm.service"
    files = {
        tmp_path / "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * GIB >> 10} kB\n",
        tmp_path / "proc/self/cgroup": "4:memory:/\n0::/system.slice/vllm.service/worker\n",
        group / "memory.max": f"{limit}\n",
        group / "memory.current": f"{7 * GIB}\n",
        group / "memory.stat": f"file {cache + GIB}\ninactive_file {cache}\nactive_file 0\n",
    }
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert devices.host_available(tmp_path) == left
