"""Sends bytes through a slot of the pool and back before an integration caches anything, and
compares them.

The comparison finds a misread layout, a broken copier, and an unreachable GPU."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator

import numpy as np
import torch

from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.metadata_server.messages import KEY_BYTES, NAMESPACE_BYTES, ChunkKey
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.copier import Copier
from vcache_backend.vram_pool.copies.planner import plan_blocks
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.pinned_pool import PinnedPool
from vcache_backend.vram_pool.slots import SlotView

log = logging.getLogger(__name__)

COPY_SECONDS = 10.0
"""How long one copy of the round trip may take."""


def through_pool(session: Session, kv: PagedKV) -> str | None:
    """`round_trip` through a slot that the server reserves under a random key: the fault, or None.

    Also None without a slot to try: no server yet, or nothing to evict. In the worker's main
    thread, after `session.bind`."""
    if isinstance(session.pool, PinnedPool):
        # The pool's segments are pinned in the background and may not be ready: try memory of the
        # same kind.
        return _through_like_memory(session.pool, session, kv)
    key = ChunkKey(session.namespace.prefix + os.urandom(KEY_BYTES - NAMESPACE_BYTES))
    try:
        reserved = session.client.reserve([key], kv.chunk_bytes(session.chunk_size))
    except VCacheError as error:
        log.debug("no round trip: %s", error)
        return None
    views = session.views([slot for slot in reserved.slots if not isinstance(slot, int)])
    wrong = round_trip(kv, session.copier, views[0], session.chunk_size) if views else None
    # After a failure a copy may still write: then the slot is not given back, and stays in
    # quarantine.
    if reserved.reservation and wrong is None:
        session.committer.give_back(reserved.reservation)
    return wrong


def _through_like_memory(pool: PinnedPool, session: Session, kv: PagedKV) -> str | None:
    try:
        with pool.trial(kv.chunk_bytes(session.chunk_size)) as view:
            return round_trip(kv, session.copier, view, session.chunk_size)
    except SegmentError as error:
        # The pool meets the same error, reports it, and stays empty.
        log.debug("no round trip: %s", error)
        return None


def round_trip(kv: PagedKV, copier: Copier, view: SlotView, chunk_size: int) -> str | None:
    """Send a chunk of the first blocks of `kv` through the slot `view` and back, and compare every
    byte.

    Returns None, or the layer and block that differ, or the error. In the worker's main thread; no
    other work may use the KV cache meanwhile. The cache's bytes are always restored, on the current
    stream. The slot's bytes are overwritten."""
    count = min(kv.blocks_in(chunk_size), kv.num_blocks)
    pages = [page for kind in kv.kinds for page in kind.pages]
    try:
        saved = [page[: count + 1].clone() for page in pages]
        try:
            wrong = _there_and_back(kv, copier, view, chunk_size, saved, count)
        finally:
            for page, bytes_ in zip(pages, saved, strict=True):
                page[: count + 1].copy_(bytes_)
        late = f"the device did not finish the byte round trip's work in {COPY_SECONDS:g} s"
        return wrong or (None if _settled(kv.device) else late)
    except (VCacheError, RuntimeError) as error:
        return f"the byte round trip through the pool failed: {str(error) or type(error).__name__}"


def _there_and_back(
    kv: PagedKV,
    copier: Copier,
    view: SlotView,
    chunk_size: int,
    saved: list[torch.Tensor],
    count: int,
) -> str | None:
    generator = torch.Generator(kv.device).manual_seed(20)
    pages = [page for kind in kv.kinds for page in kind.pages]
    patterns = [
        torch.randint(
            256, page[:count].shape, dtype=torch.uint8, generator=generator, device=kv.device
        )
        for page in pages
    ]
    for page, pattern in zip(pages, patterns, strict=True):
        page[:count] = pattern
    # Last block first: a copy that ignores block ids then shows.
    ids = np.arange(count - 1, -1, -1)
    copy = plan_blocks(kv, chunk_size, ids)
    if not copier.gather(kv, copy, [view]).wait(COPY_SECONDS):
        return f"gathering a chunk took longer than {COPY_SECONDS:g} s"
    gathered = _in_slot(kv, view, chunk_size, count)
    for plane, (pattern, in_slot) in enumerate(zip(patterns, gathered, strict=True)):
        wrong = _difference(kv, plane, pattern, in_slot.flip(0).to(kv.device))
        if wrong:
            return f"gathered wrongly into the pool: {wrong}"
    for page, pattern in zip(pages, patterns, strict=True):
        page[:count] = ~pattern
    if not copier.scatter(kv, copy, [view]).wait(COPY_SECONDS):
        return f"scattering a chunk took longer than {COPY_SECONDS:g} s"
    for plane, (page, pattern, before) in enumerate(zip(pages, patterns, saved, strict=True)):
        expected = torch.cat([pattern, before[count:]])
        wrong = _difference(kv, plane, expected, page[: count + 1])
        if wrong:
            return f"scattered wrongly from the pool: {wrong}"
    return None


def _in_slot(kv: PagedKV, view: SlotView, chunk_size: int, count: int) -> Iterator[torch.Tensor]:
    """The first `count` blocks of a chunk, plane by plane."""
    blocks, begin = kv.blocks_in(chunk_size), 0
    for kind in kv.kinds:
        end = begin + kind.chunk_bytes(chunk_size)
        chunk = view.tensor[begin:end].view(kind.layers, blocks, kind.parts, kind.page_bytes)
        for plane in range(len(kind.planes)):
            layer, part = divmod(plane, kind.parts)
            yield chunk[layer, :count, part]
        begin = end


def _difference(kv: PagedKV, plane: int, expected: torch.Tensor, found: torch.Tensor) -> str:
    """Where two runs of blocks of a plane first differ, or empty."""
    if torch.equal(expected, found):
        return ""
    block, byte = torch.nonzero(expected != found)[0].tolist()
    layer, part = divmod(plane, kv.parts)
    where = (
        f"layer {layer}, block {block}"
        + (f", part {part}" if kv.parts > 1 else "")
        + f", byte {byte}"
    )
    return f"{where} is {int(found[block, byte])} instead of {int(expected[block, byte])}"


def _settled(device: torch.device) -> bool:
    """Wait for the current stream's work so far; False if it takes too long."""
    if device.type != "cuda":
        return True
    event = torch.cuda.current_stream(device).record_event()
    deadline = time.monotonic() + COPY_SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
