"""Segments of GPU memory against a driver that counts what it gave out and can fail anywhere. On
real GPUs: test_gpu_segments.py.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from fake_cuda import GPU0, GPU1, MIB, NOTHING, UUIDS, FakeCuda
from test_segments import forged, open_fds

from vcache_backend.errors import ConfigError, SegmentError
from vcache_backend.protocol.messages import SegmentId, SegmentInfo
from vcache_backend.vram_pool import cuda_driver, devices, regions
from vcache_backend.vram_pool.cuda_driver import Driver
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.regions import OwnedSegment, create, map_segment


def cpu_view(whole: Any, ordinal: int) -> torch.Tensor:
    """What torch makes of a mapping, where there is no GPU: host memory that keeps `whole`
    alive.
    """
    described = whole.__cuda_array_interface__
    return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=described, whole=whole)))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine of two fake GPUs; torch is on the first."""
    fake = FakeCuda()
    driver = Driver(fake)
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.setattr(devices, "current_gpu", lambda: 0)
    monkeypatch.setattr(regions, "view", cpu_view)
    return fake


def why_not_mapped(owned: OwnedSegment, reader: Device) -> str:
    """Not by `pytest.raises`: it may keep the traceback, and with it the mapping."""
    try:
        map_segment(owned.info, owned.fd, reader)
    except SegmentError as error:
        return str(error)
    return ""


@pytest.fixture
def owned(cuda: FakeCuda) -> Iterator[OwnedSegment]:
    with create(GPU0, 4 * MIB) as segment:
        yield segment


# ---- names of devices


def test_a_gpu_is_named_by_its_uuid_however_it_is_asked_for(cuda: FakeCuda) -> None:
    assert devices.resolve("auto") == devices.resolve("cuda") == devices.resolve("cuda:0") == GPU0
    assert devices.resolve("cuda:1") == devices.resolve(UUIDS[1]) == GPU1
    assert devices.resolve("GPU-" + UUIDS[1][4:].upper()) == GPU1
    assert str(GPU1) == "GPU-00000000-0000-0000-0000-00000000abc1 (cuda:1)"


def test_missing_bindings_are_a_line_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(devices, "current_gpu", lambda: 0)
    monkeypatch.setattr(cuda_driver, "load", cuda_driver.load.__wrapped__)
    said = r"pip install 'cuda-bindings==13\.\*'"
    for ask in (lambda: create(GPU0, MIB), devices.gpus, lambda: devices.resolve("auto")):
        with pytest.raises((SegmentError, ConfigError), match=said) as caught:
            cast(Callable[[], object], ask)()
        assert "\n" not in str(caught.value)


# ---- against the counting driver


def test_a_gpu_segment_is_rounded_up_and_only_its_fd_remains(cuda: FakeCuda) -> None:
    before = open_fds()
    with create(GPU1, 3 * MIB) as owned:
        assert owned.info == SegmentInfo(owned.id, UUIDS[1], "cuda", 4 * MIB)
        assert not os.get_inheritable(owned.fd)
        assert cuda.holds() == NOTHING
    assert open_fds() <= before


@pytest.mark.parametrize("reader", [GPU0, GPU1])
def test_a_mapping_is_readable_on_its_reader_and_lives_as_long_as_a_tensor_of_it(
    cuda: FakeCuda, owned: OwnedSegment, reader: Device
) -> None:
    with map_segment(owned.info, owned.fd, reader) as mapped:
        part = mapped.whole[:64][8:16]
        assert cuda.allowed[mapped.whole.data_ptr()] == reader.ordinal
    assert cuda.holds() == NOTHING | {"contexts": 1, "handles": 1, "ranges": 1, "mapped": 1}
    del mapped, part
    assert cuda.holds() == NOTHING


def test_unmapping_waits_for_work_and_runs_backwards(cuda: FakeCuda, owned: OwnedSegment) -> None:
    mapped = map_segment(owned.info, owned.fd, GPU1)
    cuda.calls.clear()
    mapped.close()
    mapped.close()
    order = ["cuCtxPushCurrent", "cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]
    order += ["cuMemRelease", "cuCtxPopCurrent", "cuDevicePrimaryCtxRelease"]
    assert [name for name in cuda.calls if name != "cuDeviceGet"] == order


SETUP = ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemImportFromShareableHandle"]
SETUP += ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]


@pytest.mark.parametrize("call", SETUP)
def test_a_failed_mapping_leaves_nothing(cuda: FakeCuda, owned: OwnedSegment, call: str) -> None:
    before = open_fds()
    cuda.broken = call
    message = f"GPU {UUIDS[1]} cannot map 4,194,304 B of GPU {UUIDS[0]}: {call}: CUDA_ERROR"
    with pytest.raises(SegmentError, match=f"segment {owned.id} of {UUIDS[0]}: {message}"):
        map_segment(owned.info, owned.fd, GPU1)
    assert (cuda.holds(), open_fds() <= before) == (NOTHING, True)


@pytest.mark.parametrize(
    "call",
    ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemCreate", "cuMemExportToShareableHandle"],
)
def test_a_creation_that_fails_at_any_step_leaves_nothing(cuda: FakeCuda, call: str) -> None:
    before = open_fds()
    cuda.broken = call
    with pytest.raises(SegmentError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
        create(GPU0, MIB)
    assert (cuda.holds(), open_fds() <= before) == (NOTHING, True)


def test_a_torch_that_cannot_view_the_mapping_leaves_nothing(
    cuda: FakeCuda, owned: OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(whole: Any, ordinal: int) -> torch.Tensor:
        raise SegmentError("torch has no CUDA")

    monkeypatch.setattr(regions, "view", refuse)
    assert "torch has no CUDA" in why_not_mapped(owned, GPU0)
    gc.collect()  # Python 3.12 keeps the traceback in a cycle
    assert cuda.holds() == NOTHING


def test_a_clean_up_that_fails_is_logged_and_goes_on(
    cuda: FakeCuda, owned: OwnedSegment, caplog: pytest.LogCaptureFixture
) -> None:
    mapped = map_segment(owned.info, owned.fd, GPU0)
    cuda.broken = "cuCtxSynchronize"
    with caplog.at_level(logging.WARNING):
        mapped.close()
    assert cuda.holds() == NOTHING
    assert "clean-up of a GPU segment: cuCtxSynchronize: CUDA_ERROR_INVALID_VALUE" in caplog.text


def test_no_peer_access_is_refused_by_both_names(cuda: FakeCuda, owned: OwnedSegment) -> None:
    cuda.peers = False
    cuda.calls.clear()
    with pytest.raises(SegmentError, match=f"GPU {UUIDS[1]} has no peer access to GPU {UUIDS[0]}"):
        map_segment(owned.info, owned.fd, GPU1)
    assert "cuMemImportFromShareableHandle" not in cuda.calls
    with map_segment(owned.info, owned.fd, GPU0):
        assert cuda.holds()["mapped"] == 1


@pytest.mark.parametrize(("kind", "what"), [("plain", "-rw"), ("small", "-rw"), ("socket", "srw")])
def test_other_memory_never_reaches_the_driver(cuda: FakeCuda, kind: str, what: str) -> None:
    info = SegmentInfo(SegmentId("0123456789ab"), UUIDS[0], "cuda", 4 * MIB)
    with socket.socket() as other, forged("plain" if kind == "socket" else kind) as file:
        fd = other.fileno() if kind == "socket" else file
        with pytest.raises(SegmentError, match=f"is {what}.*, not exported GPU memory"):
            map_segment(info, fd, GPU0)
    assert "cuMemImportFromShareableHandle" not in cuda.calls


def test_a_size_that_memory_does_not_have_is_refused(cuda: FakeCuda, owned: OwnedSegment) -> None:
    with pytest.raises(SegmentError, match="4,194,305 B is not a multiple of 2,097,152 B"):
        map_segment(msgspec.structs.replace(owned.info, nbytes=4 * MIB + 1), owned.fd, GPU0)
    said = "cannot map 8,388,608 B .*cuMemMap: CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(SegmentError, match=said):
        map_segment(msgspec.structs.replace(owned.info, nbytes=8 * MIB), owned.fd, GPU0)
    assert cuda.holds() == NOTHING
