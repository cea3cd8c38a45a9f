"""Segments: what outlives whom, what is refused, and that nothing is left behind. Host memory is
real; GPU memory is a driver's that counts what it gave out and can fail anywhere, and on GPUs it is
real, too. What several processes do with segments: test_engine_processes."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from fake_cuda import GPU0, GPU1, MIB, NOTHING, UUIDS, FakeCuda, cuda
from memory_cases import NBYTES, forged, mappings, open_fds, why_not_mapped

from vcache_backend.errors import SegmentError
from vcache_backend.protocol.messages import SegmentId, SegmentInfo
from vcache_backend.vram_pool import cuda_driver, devices, regions
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.regions import OwnedSegment, create, map_segment

__all__ = ["cuda"]

HOST = Device("host", "host")
SIZE = 64 * MIB
ID = SegmentId("0123456789ab")


@pytest.fixture
def on_host() -> Iterator[OwnedSegment]:
    with create(HOST, NBYTES) as segment:
        yield segment


@pytest.fixture
def on_gpu(cuda: FakeCuda) -> Iterator[OwnedSegment]:
    with create(GPU0, 4 * MIB) as segment:
        yield segment


# ---- host memory


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("small", r"holds 4,096 B but the segment is said to have 1,048,576 B"),
        ("unsealed", r"other seals .it has 0x0, needs 0x7"),
        ("frozen", r"Operation not permitted"),
        ("huge", r"huge pages: .* SIGBUS"),
    ],
)
def test_a_forged_fd_is_refused_with_figures_and_leaves_nothing(kind: str, message: str) -> None:
    with forged(kind) as fd:
        before = open_fds()
        with pytest.raises(SegmentError, match=f"segment 0123456789ab of host: .*{message}"):
            map_segment(SegmentInfo(ID, "host", "host", NBYTES), fd, HOST)
        assert open_fds() <= before


def test_a_gpu_does_not_map_host_memory_and_a_host_no_gpu_memory(on_host: OwnedSegment) -> None:
    assert "host memory of host: GPU-0" in why_not_mapped(on_host, GPU0)
    of_gpu = msgspec.structs.replace(on_host.info, device=GPU0.name, medium="cuda")
    with pytest.raises(SegmentError, match="cuda memory of GPU-0.*: host cannot map that"):
        map_segment(of_gpu, on_host.fd, HOST)


def test_close_may_be_called_again_and_what_is_closed_says_so(on_host: OwnedSegment) -> None:
    on_host.close()
    # The number may be another file's by now: closing again must not close that.
    replacement = os.open("/dev/null", os.O_RDONLY)
    on_host.close()
    os.fstat(replacement)
    os.close(replacement)
    with pytest.raises(SegmentError, match=f"segment {on_host.id} is closed"):
        _ = on_host.fd


def test_a_tensor_outlives_its_segment_and_the_mapping_goes_with_it(on_host: OwnedSegment) -> None:
    gc.collect()
    before = open_fds(), mappings()
    part = map_segment(on_host.info, on_host.fd, HOST)[10:20].view(torch.int16)
    part.fill_(257)
    assert part.tolist() == [257] * 5
    held = mappings()
    del part
    assert (open_fds() <= before[0], mappings() <= before[1], mappings() < held) == (True,) * 3


# ---- GPU memory, of the counting driver


def test_a_gpu_segment_is_rounded_up_and_only_its_fd_remains(cuda: FakeCuda) -> None:
    before = open_fds()
    with create(GPU1, 3 * MIB) as owned:
        assert owned.info == SegmentInfo(owned.id, UUIDS[1], "cuda", 4 * MIB)
        assert not os.get_inheritable(owned.fd)
        assert cuda.holds() == NOTHING
    assert open_fds() <= before


@pytest.mark.parametrize("reader", [GPU0, GPU1])
def test_a_mapping_is_readable_on_its_reader_and_lives_as_long_as_a_tensor_of_it(
    cuda: FakeCuda, on_gpu: OwnedSegment, reader: Device
) -> None:
    whole = map_segment(on_gpu.info, on_gpu.fd, reader)
    assert cuda.allowed[whole.data_ptr()] == reader.ordinal
    part = whole[:64][8:16]
    del whole
    assert cuda.holds() == NOTHING | {"contexts": 1, "handles": 1, "ranges": 1, "mapped": 1}
    cuda.calls.clear()
    del part
    assert cuda.holds() == NOTHING
    # It waits for work, and undoes backwards.
    order = ["cuCtxPushCurrent", "cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]
    order += ["cuMemRelease", "cuCtxPopCurrent", "cuDevicePrimaryCtxRelease"]
    assert [name for name in cuda.calls if name != "cuDeviceGet"] == order


CONTEXT = ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"]
MAPPING = ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
CREATION = ["cuMemCreate", "cuMemExportToShareableHandle"]


@pytest.mark.parametrize("call", CONTEXT + MAPPING)
def test_a_failed_mapping_leaves_nothing(cuda: FakeCuda, on_gpu: OwnedSegment, call: str) -> None:
    before = open_fds()
    cuda.broken = call
    message = f"GPU {UUIDS[1]} cannot map 4,194,304 B of GPU {UUIDS[0]}: {call}: CUDA_ERROR"
    with pytest.raises(SegmentError, match=f"segment {on_gpu.id} of {UUIDS[0]}: {message}"):
        map_segment(on_gpu.info, on_gpu.fd, GPU1)
    assert (cuda.holds(), open_fds() <= before) == (NOTHING, True)


@pytest.mark.parametrize("call", CONTEXT + CREATION)
def test_a_creation_that_fails_at_any_step_leaves_nothing(cuda: FakeCuda, call: str) -> None:
    before = open_fds()
    cuda.broken = call
    with pytest.raises(SegmentError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
        create(GPU0, MIB)
    assert (cuda.holds(), open_fds() <= before) == (NOTHING, True)


def test_a_torch_that_cannot_view_the_mapping_leaves_nothing(
    cuda: FakeCuda, on_gpu: OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(mapping: Any, ordinal: int) -> torch.Tensor:
        raise SegmentError("torch has no CUDA")

    monkeypatch.setattr(regions, "view", refuse)
    assert "torch has no CUDA" in why_not_mapped(on_gpu, GPU0)
    gc.collect()  # Python 3.12 keeps the traceback in a cycle
    assert cuda.holds() == NOTHING


def test_a_clean_up_that_fails_is_logged_and_goes_on(
    cuda: FakeCuda, on_gpu: OwnedSegment, caplog: pytest.LogCaptureFixture
) -> None:
    mapped = map_segment(on_gpu.info, on_gpu.fd, GPU0)
    cuda.broken = "cuCtxSynchronize"
    with caplog.at_level(logging.WARNING):
        del mapped
    assert cuda.holds() == NOTHING
    assert "clean-up of a GPU segment: cuCtxSynchronize: CUDA_ERROR_INVALID_VALUE" in caplog.text


def test_no_peer_access_is_refused_by_both_names(cuda: FakeCuda, on_gpu: OwnedSegment) -> None:
    cuda.peers = False
    cuda.calls.clear()
    assert f"GPU {UUIDS[1]} has no peer access to GPU {UUIDS[0]}" in why_not_mapped(on_gpu, GPU1)
    assert "cuMemImportFromShareableHandle" not in cuda.calls
    whole = map_segment(on_gpu.info, on_gpu.fd, GPU0)
    assert (len(whole) > 0, cuda.holds()["mapped"]) == (True, 1)


def test_other_memory_never_reaches_the_driver(cuda: FakeCuda) -> None:
    with socket.socket() as other, forged("small") as file:
        for fd, what in ((file, "-rw"), (other.fileno(), "srw")):
            with pytest.raises(SegmentError, match=f"is {what}.*, not exported GPU memory"):
                map_segment(SegmentInfo(ID, UUIDS[0], "cuda", 4 * MIB), fd, GPU0)
    assert "cuMemImportFromShareableHandle" not in cuda.calls


def test_a_size_that_memory_does_not_have_is_refused(cuda: FakeCuda, on_gpu: OwnedSegment) -> None:
    odd = "4,194,305 B is not a multiple of 2,097,152 B"
    large = "cannot map 8,388,608 B .*cuMemMap: CUDA_ERROR_INVALID_VALUE"
    for nbytes, said in ((4 * MIB + 1, odd), (8 * MIB, large)):
        with pytest.raises(SegmentError, match=said):
            map_segment(msgspec.structs.replace(on_gpu.info, nbytes=nbytes), on_gpu.fd, GPU0)
    assert cuda.holds() == NOTHING


# ---- real GPUs


@pytest.mark.gpu
def test_the_real_driver_refuses_an_fd_of_something_else_and_more_memory_than_there_is() -> None:
    device = devices.resolve("cuda:0")
    refused = pytest.raises(SegmentError, match=f"segment 0123456789ab of {device.name}")
    with open("/dev/null", "rb") as other, refused:
        map_segment(SegmentInfo(ID, device.name, "cuda", SIZE), other.fileno(), device)
    said = r"needs [\d,]+ B but [\d,]+ of [\d,]+ B are free; set pool.segment_bytes <= \d+"
    with pytest.raises(SegmentError, match=said):
        create(device, 4 << 40)


@pytest.mark.gpu
def test_memory_is_locked_while_another_thread_captures_a_graph() -> None:
    """As the pool does while vLLM captures its own."""
    numbers = torch.zeros(8, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    locked = list[torch.Tensor]()
    numbers.add_(0)
    torch.cuda.synchronize()
    with create(HOST, SIZE) as owned:

        def lock() -> None:
            cuda_driver.load().beside_captures()
            locked.append(map_segment(owned.info, owned.fd, devices.resolve("host", "cuda:0")))

        with torch.cuda.graph(graph, capture_error_mode="global"):
            numbers.add_(1)
            thread = threading.Thread(target=lock)
            thread.start()
            thread.join()
            numbers.add_(1)
    graph.replay()
    assert numbers.tolist() == [2.0] * 8
