"""Segments of GPU memory on real GPUs. What several processes do with them:
test_cross_process_store_retrieve.py.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import pytest
import torch
from test_segments import forged, left_behind

from vcache_backend.errors import SegmentError
from vcache_backend.protocol.messages import SegmentId, SegmentInfo
from vcache_backend.vram_pool import cuda_driver, devices
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.regions import MappedSegment, create, map_segment

MIB = 1 << 20
SIZE = 64 * MIB


def pattern(device: torch.device, nbytes: int = SIZE) -> torch.Tensor:
    return (torch.arange(nbytes, device=device) % 251).to(torch.uint8)


class Memory(NamedTuple):
    """Bytes that torch takes for a GPU's."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = (self.address, False)
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "version": 3}


@pytest.mark.gpu
def test_an_fd_of_something_else_is_refused_by_the_real_driver() -> None:
    device = devices.resolve("cuda:0")
    info = SegmentInfo(SegmentId("0123456789ab"), device.name, "cuda", SIZE)
    refused = pytest.raises(SegmentError, match=f"segment 0123456789ab of {device.name}")
    with forged("device") as fd, refused:
        map_segment(info, fd, device)


@pytest.mark.gpu
def test_more_memory_than_the_gpu_has_is_refused_with_the_figures() -> None:
    said = r"needs [\d,]+ B but [\d,]+ of [\d,]+ B are free; set pool.segment_bytes <= \d+"
    with pytest.raises(SegmentError, match=said):
        create(devices.resolve("cuda:0"), 4 << 40)


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_200_lives_of_a_gpu_segment_leave_no_fd_and_no_memory() -> None:
    """Its memory lives as long as the last fd. Tests beside this one take and free memory of the
    same GPU, so what is free says nothing: a life takes so much that 200 would not fit."""
    device = devices.resolve("cuda:0")
    nbytes = torch.cuda.mem_get_info(0)[1] // 60 // (2 * MIB) * (2 * MIB)

    def life() -> None:
        with create(device, nbytes) as owned:
            info, kept = owned.info, os.dup(owned.fd)
        with map_segment(info, kept, device) as mapped:
            os.close(kept)
            mapped.whole[:1].fill_(1)

    assert left_behind(life, cycles=200) == (0, 0)


@pytest.mark.gpu
def test_every_gpu_reads_and_writes_locked_host_memory_where_it_lies() -> None:
    plain = Device("host", "host")
    with create(plain, SIZE) as owned, map_segment(owned.info, owned.fd, plain) as other:
        for ordinal in range(torch.cuda.device_count()):
            with map_segment(
                owned.info, owned.fd, devices.resolve("host", f"cuda:{ordinal}")
            ) as mapped:
                address = mapped.whole.data_ptr()
                seen = torch.as_tensor(Memory(address, SIZE), device=f"cuda:{ordinal}")
                assert (seen.device, seen.data_ptr()) == (torch.device("cuda", ordinal), address)
                torch.add(pattern(seen.device), ordinal, out=seen)
                torch.cuda.synchronize(ordinal)
                assert torch.equal(other.whole[:SIZE], pattern(torch.device("cpu")) + ordinal)
                other.whole[5:6].fill_(99)
                # What comes of a kernel: torch's own copies take `seen` for memory of the GPU.
                assert (seen[4:7] == 99).tolist() == [False, True, False]
                del seen
            # Unmapped and unlocked, with the device still in order.
            assert int(torch.ones(8, device=f"cuda:{ordinal}").sum()) == 8


@pytest.mark.gpu
def test_memory_is_locked_while_another_thread_captures_a_graph() -> None:
    """As the pool does while vLLM captures its own."""
    numbers = torch.zeros(8, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    locked = list[MappedSegment]()
    numbers.add_(0)
    torch.cuda.synchronize()
    with create(Device("host", "host"), SIZE) as owned:

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
    (mapped,) = locked
    mapped.close()


@pytest.mark.gpu(count=2)
def test_a_peer_reads_and_writes_the_segment_of_the_other_gpu() -> None:
    device = devices.resolve("cuda:0")
    with create(device, SIZE) as owned, map_segment(owned.info, owned.fd, device) as mapped:
        mapped.whole[:SIZE].copy_(pattern(mapped.whole.device))
        torch.cuda.synchronize(0)
        with map_segment(owned.info, owned.fd, devices.resolve("cuda:1")) as peer:
            whole = peer.whole[:SIZE]
            assert whole.device == torch.device("cuda:1")
            assert torch.equal(whole, pattern(whole.device))
            peer.whole[5:6].fill_(254)
            torch.cuda.synchronize(1)
            del whole
        assert mapped.whole[5:6].item() == 254
