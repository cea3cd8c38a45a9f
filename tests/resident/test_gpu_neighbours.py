"""KV caches of other instances on real GPUs: read over NVLink, and given back to the GPU when their
owner dies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import torch
from kv_cases import Sizes
from neighbour_cases import Reader, instance, owner, pull, read, still
from processes import SECONDS, Stage, eventually

from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.copies.cuda_copier import CudaCopier

SIZES = Sizes(layers=4, heads=8, dim=128, blocks=64)
LIVES = 4


@pytest.fixture
def reader(stage: Stage) -> Iterator[Reader]:
    """A worker on `cuda:0`."""
    device = devices.resolve("cuda:0")
    with closing(Reader(stage.client(device=device.name), device, SIZES)) as made:
        yield made


@pytest.mark.gpu
def test_a_copy_out_of_a_killed_owners_memory_ends_well(stage: Stage, reader: Reader) -> None:
    """The owner dies while the copy waits in its stream; then the memory goes."""
    with owner(stage, device="cuda:0", sizes=SIZES) as there, ExitStack() as undo:
        copier = CudaCopier(0)
        undo.callback(copier.drain)
        generations = there.ask("write", [9], 90)
        neighbour = reader.there(instance(1))
        read(neighbour, reader.cache, 9, copier=copier)
        reader.cache.mark(0, 0)
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call] # some 0.6 s
        copy = pull(neighbour, reader.cache, 9, copier)
        there.kill()
        assert copy.wait(SECONDS)
        assert still(neighbour.view, [9], generations)
        assert reader.cache.held(0) == 90
        left = weakref.ref(neighbour)
        del neighbour, copy
        eventually(lambda: left() is None)
        reader.cache.mark(1, 7)
        torch.cuda.synchronize()
        assert reader.cache.held(1) == 7


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_the_memory_of_a_killed_owner_that_somebody_had_mapped_is_free_for_the_next(
    stage: Stage, reader: Reader
) -> None:
    """Each takes two fifths of the GPU, so that a third does not fit beside two that are dead."""
    block = SIZES.layers * 2 * SIZES.block_size * SIZES.heads * SIZES.dim * 2
    sizes = SIZES._replace(blocks=int(torch.cuda.mem_get_info(0)[1] * 0.4) // block)
    for life in range(1, LIVES + 1):
        with owner(stage, life, device="cuda:0", sizes=sizes) as there:
            mapped = weakref.ref(reader.there(instance(life)))
            there.kill()
            # Gone from here, with nobody asking; the server lets go a moment later.
            eventually(lambda left=mapped: left() is None)
        eventually(lambda: torch.cuda.mem_get_info(0)[0] >= sizes.blocks * block)
