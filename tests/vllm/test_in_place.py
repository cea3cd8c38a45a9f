"""What the worker of an instance that shares in place saves in the pool beside it, when vLLM is about to
use its blocks again. And the context in which vLLM makes its KV cache: what becomes exportable, and that
nothing of ours raises into vLLM. The memory itself: test_exports. In real vLLM: test_real_in_place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import numpy as np
import pytest
from engine_cases import ROOMY, Node, UnfinishedCopier
from in_place_cases import here
from kv_cases import Cache, layout_of
from processes import SECONDS, eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from vcache_backend.errors import LayoutError, SegmentError
from vcache_backend.integration.vllm.metadata import PublicationSpec, SavedChunks
from vcache_backend.integration.vllm.telemetry.stats import Meter
from vcache_backend.integration.vllm.worker.in_place import Exporter, InPlace
from vcache_backend.integration.vllm.worker.stores import Attached, Stores
from vcache_backend.protocol.messages import (
    HASH_BYTES,
    NAMESPACE_BYTES,
    RANK_BYTES,
    BlockRun,
    BlockTable,
    ChunkKey,
    InstanceId,
    Join,
)
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.generations import Generations

__all__ = ["here"]
pytestmark = needs_vllm


class Sharing:
    """A worker that shares its KV cache, in blocks 2n and 2n + 1 of which chunk n is, and lends to
    the pool. Its stores are read when a test says so."""

    def __init__(self, here: Node, undo: ExitStack) -> None:
        cache, exporter = Cache(), Exporter("cpu")
        around = exporter.context()
        assert around is not None
        with around:
            # As vLLM makes it.
            nbytes = sum(tensor.nbytes for tensor in cache.tensors)
            raw = torch.zeros(nbytes, dtype=torch.int8, device="cpu")
        each_layer = raw.view(torch.bfloat16).view(len(cache.tensors), *cache.tensors[0].shape)
        tensors = {f"layer {number}": one for number, one in enumerate(each_layer)}
        self.copier = UnfinishedCopier()
        self.session = Session(here.config("host", ROOMY), layout_of(cache), copier=self.copier)
        undo.callback(self.session.close)
        undo.callback(self.copier.finished.set)
        self.in_place = InPlace(exporter, cache.sizes.blocks, shows=True)
        self.stores = Stores(Meter())
        undo.callback(self.in_place.close)
        kv = self.session.bind(tensors)
        self.in_place.open(self.session, kv, tensors)
        self.attached = Attached(self.session, kv, cache.sizes.block_size)
        self.name = name = InstanceId(b"w" * 16)
        self.client = undo.enter_context(here.client())
        self.table = Generations(name, cache.sizes.blocks)
        undo.callback(self.table.close)
        prefix = self.session.namespace.prefix
        tables = [BlockTable("full")]
        self.client.join(Join(name, prefix, self.table.blocks, 1, 2, tables), self.table.fd)
        self.in_place.show(self.session, name)
        self.keys = [ChunkKey(prefix + os.urandom(16) + b"\0\0") for _ in range(4)]
        self.epoch = self.client.present(self.keys).epoch

    def publish(self, *chunks: int) -> None:
        """Each is a request's."""
        specs = [PublicationSpec([self._run(chunk)], self.epoch) for chunk in chunks]
        self.in_place.publish(specs)
        assert self.in_place.publisher is not None
        assert self.in_place.publisher.outbox.flush(SECONDS)

    def save(self, *chunks: int) -> None:
        keys, packs = [self.keys[chunk] for chunk in chunks], self._packed(*chunks)
        self.in_place.save(self.attached, SavedChunks(keys, *packs, self.epoch), self.stores)

    def saved(self, chunk: int) -> bool:
        """Whether the pool has it, once everything that was saved is read."""
        self.copier.finished.set()
        assert self.session.flush(SECONDS)
        return bool(self.client.lookup([self.keys[chunk]]))

    def _run(self, chunk: int) -> BlockRun:
        hashes = bytes([chunk]) * HASH_BYTES + self.keys[chunk][NAMESPACE_BYTES:-RANK_BYTES]
        return BlockRun(0, *self._packed(chunk), 0, hashes)

    def _packed(self, *chunks: int) -> tuple[bytes, bytes]:
        """The chunks' blocks, and their generations."""
        blocks = np.array([(2 * chunk, 2 * chunk + 1) for chunk in chunks], dtype="<u4")
        return blocks.tobytes(), np.full_like(blocks, 2, "<u8").tobytes()


@pytest.fixture
def sharing(here: Node) -> Iterator[Sharing]:
    with ExitStack() as undo:
        yield Sharing(here, undo)


def test_what_was_never_published_is_not_saved(sharing: Sharing) -> None:
    """Nobody knows that it was computed from what it should be."""
    sharing.publish(2)
    for chunk in range(4):
        sharing.save(chunk)
    assert [sharing.saved(chunk) for chunk in range(4)] == [False, False, True, False]


@pytest.mark.parametrize("how", ["handed out", "reset"])
def test_what_changes_hands_while_it_is_saved_is_never_found(sharing: Sharing, how: str) -> None:
    sharing.publish(0, 1)
    sharing.save(0)
    if how == "reset":
        sharing.table.void_all()
    else:
        sharing.table.void([1])
    assert not sharing.saved(0)
    assert sharing.session.stats.counted("not_stored_")["changed"] == 1
    sharing.save(1)
    assert sharing.saved(1) == (how == "handed out"), "its slot was given back"
    eventually(lambda: sharing.client.stats().reservations == 0)


def test_what_was_published_before_somebody_elses_reset_is_not_saved(sharing: Sharing) -> None:
    """Its scheduler has not heard of it."""
    sharing.publish(0)
    sharing.client.clear(sharing.session.namespace.prefix, reset=True)
    sharing.save(0)
    assert not sharing.saved(0)
    assert sharing.client.stats().reservations == 0


# ---- the memory of vLLM's KV cache


def kv(device: str = "cpu") -> torch.Tensor:
    """As vLLM makes its KV cache."""
    return torch.zeros((1 << 20) + 100, dtype=torch.int8, device=torch.device(device))


def test_vllm_is_given_a_context_for_its_kv_cache_and_for_nothing_else() -> None:
    exporter = Exporter("cpu")
    before = kv()
    context = exporter.context()
    with context:
        other, whole = kv(), kv()
        layers = {"a": whole[100:], "b": whole}
    region = exporter.region(layers)
    assert region.address == whole.data_ptr()
    for tensor in (before, other, kv()):
        assert not region.address <= tensor.data_ptr() < region.address + region.nbytes


def test_a_kv_cache_that_lies_elsewhere_is_named() -> None:
    message = "1,048,676 B on cpu lie in none of the 0 exportable allocations (another "
    message += "connector or allocator has made it); or set connector.share: pool"
    with pytest.raises(LayoutError, match=re.escape(message)):
        Exporter("cpu").region({"layers.0": kv()})


@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
def test_a_context_that_fails_raises_nothing(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("torch says no")

    monkeypatch.setattr(TorchFunctionMode, place, fail)
    exporter = Exporter("cpu")
    with exporter.context() or nullcontext():
        layer = kv()
    said = "cannot be shared in place: RuntimeError: torch says no"
    with pytest.raises(SegmentError, match=said):
        exporter.region({"layers.0": layer})
    while torch._C._len_torch_function_stack():
        overrides._pop_mode()


def test_what_vllm_raises_within_its_context_is_vllms() -> None:
    context = Exporter("cpu").context()
    with pytest.raises(MemoryError), context:
        raise MemoryError
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.gpu
def test_a_gpus_kv_cache_is_exported() -> None:
    torch.cuda.set_device(0)
    exporter = Exporter("cuda")
    with exporter.context() or nullcontext():
        cache = kv("cuda:0")
    region = exporter.region({"layers.0": cache})
    assert region.address <= cache.data_ptr() < region.address + region.nbytes
