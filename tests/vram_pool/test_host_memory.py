"""Segments in host memory that GPUs read, against a driver that counts what it locked. On real GPUs:
test_regions.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from engine_cases import here, served
from fake_cuda import MIB, NOTHING, FakeCuda, cuda
from memory_cases import mappings, open_fds, why_not_mapped
from processes import info

from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool import devices, host_memory
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.regions import create, map_segment

__all__ = ["cuda", "here", "served"]
HOST = Device("host:a", "host", 0)


@pytest.fixture
def quiet(cuda: FakeCuda) -> Iterator[None]:
    """Nothing is left of a test that asks for this, memory and descriptors included."""
    gc.collect()
    before = open_fds(), mappings()
    yield
    gc.collect()
    assert (open_fds() <= before[0], mappings() <= before[1], cuda.holds()) == (True, True, NOTHING)


# ---- segments


@pytest.mark.parametrize("nbytes", [MIB, 12_345])
def test_a_segment_is_locked_while_a_tensor_lives(cuda: FakeCuda, quiet: None, nbytes: int) -> None:
    with create(HOST, nbytes) as owned:
        assert cuda.holds() == NOTHING
        whole = map_segment(owned.info, owned.fd, HOST)
    part = whole[:64][8:16]
    part.fill_(7)
    assert cuda.registered == {whole.data_ptr(): -(-nbytes // 4096) * 4096}
    del whole
    assert cuda.holds() == NOTHING | {"contexts": 1, "registered": 1}
    assert part.tolist() == [7] * 8
    cuda.calls.clear()
    del part
    assert cuda.calls.index("cuCtxSynchronize") < cuda.calls.index("cuMemHostUnregister")


@pytest.mark.parametrize(
    "call", ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemHostRegister"]
)
def test_a_segment_that_failed_leaves_nothing(cuda: FakeCuda, quiet: None, call: str) -> None:
    with create(HOST, MIB) as owned:
        cuda.broken = call
        message = why_not_mapped(owned, HOST)
    assert f"segment {owned.id} of host:a: " in message
    assert f"{call}: CUDA_ERROR" in message


def test_memory_is_locked_step_by_step_and_given_back_where_a_step_fails(
    cuda: FakeCuda, quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_STEP_BYTES", MIB // 4)
    with create(HOST, MIB - 12_345) as owned:
        whole = map_segment(owned.info, owned.fd, HOST)
        start, steps = whole.data_ptr(), [MIB // 4, MIB // 4, MIB // 4, MIB // 4 - 12_288]
        assert cuda.registered == {start + at * (MIB // 4): size for at, size in enumerate(steps)}
        whole[: owned.nbytes].fill_(3)
        del whole
    assert cuda.registered == {}
    cuda.most_registered = MIB // 2
    with create(HOST, MIB) as owned:
        assert "cannot lock 262,144 B" in why_not_mapped(owned, HOST)


def test_the_last_gibibyte_of_the_machine_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, quiet: None
) -> None:
    answers = [0, host_memory.SPARE_BYTES + MIB]
    monkeypatch.setattr(devices, "host_available", lambda: answers.pop(0))
    create(HOST, MIB).close()
    monkeypatch.setattr(devices, "host_available", lambda: host_memory.SPARE_BYTES + MIB - 1)
    monkeypatch.setattr(host_memory._wait_for_room, "__defaults__", (0.0,))
    why = "1,074,790,399 B of host memory are available, and 1,073,741,824 of them stay free"
    with pytest.raises(SegmentError, match=why):
        create(HOST, MIB)


def test_memory_that_is_yet_to_be_allocated_is_not_mapped_where_there_is_too_little(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, quiet: None, memfd: int
) -> None:
    """It may be another process's, and of any size."""
    monkeypatch.setattr(devices, "host_available", lambda: host_memory.SPARE_BYTES + 1)
    segment = info("s0", os.fstat(memfd).st_size, "host:a")
    with pytest.raises(SegmentError, match="are not allocated yet"):
        map_segment(segment, memfd, HOST)
    os.pwrite(memfd, bytes(segment.nbytes), 0)
    map_segment(segment, memfd, HOST)
