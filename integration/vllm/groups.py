"""The groups of a model's layers that have block tables of their own: what a chunk has of each, which of it a hit needs, and what of it is
still there.

Of vLLM's objects only the names of their types and their numbers are looked at: this imports no vLLM, and runs where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.paged import Share

from .weights import digest

NULL = 0
"""vLLM's block of nobody, where a window has passed."""
STATES = "MambaSpec"
"""vLLM's kind of layers that keep a state, not tokens: Mamba's, gated delta nets', short convolutions'."""
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOWED = "SlidingWindowSpec"
_SIZES = "UniformTypeKVCacheSpecs"
_REASONS: Mapping[str, str] = {
    STATES: "layers that keep a state (Mamba, gated delta nets, short convolutions) have no blocks of tokens: nothing to change",
    "ChunkedLocalAttentionSpec": (
        "chunked local attention gives blocks back while their request runs: unset VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
    ),
    _SIZES: "layers of one block table have pages of several sizes: nothing to change",
    "CrossAttentionSpec": "an encoder's output is nobody's prefix: nothing to change",
    "EncoderOnlyAttentionSpec": "an encoder's output is nobody's prefix: nothing to change",
}


class LayerGroup(NamedTuple):
    """number: vLLM's. block_size: in tokens. window: tokens that its layers look back at, the next one's own with them, and those that
    vLLM keeps beside; 0: all there are."""

    number: int
    block_size: int
    window: int
    layers: tuple[str, ...] = ()


class Groups:
    """Those of one instance, those that look at all tokens first. Immutable; the same in the scheduler and in workers.

    block: tokens that are whole blocks of all of them. shares: what a chunk has of each. Rows: a request's blocks, by vLLM's number of
    the group.
    """

    def __init__(self, groups: Sequence[LayerGroup], chunk_size: int) -> None:
        """LayoutError if chunks are not made of whole blocks of each."""
        self.groups = sorted(groups, key=lambda group: (group.window > 0, group.number))
        self.block, self._size = math.lcm(*(group.block_size for group in groups)), chunk_size
        if chunk_size % self.block:
            fitting = -(-chunk_size // self.block) * self.block
            raise LayoutError(f"chunk_size {chunk_size} is no multiple of {self.block} tokens: set engine.chunk_size: {fitting}")
        self.shares = tuple(Share(group.block_size, _tail(group, chunk_size)) for group in self.groups)

    @property
    def text(self) -> str:
        """Their kinds, on which two instances must agree."""
        kinds = (f"window{group.window}" if group.window else "full" for group in self.groups)
        return " ".join(f"{kind}/{group.block_size}" for kind, group in zip(kinds, self.groups, strict=True))

    @property
    def layers(self) -> str:
        """A digest of what they are called, group by group, in the order in which a chunk holds them."""
        return digest([list(group.layers) for group in self.groups])

    @property
    def blocks(self) -> int:
        """Of a chunk, all groups' together. Each is as large as the pages of the widest group's layers."""
        return sum((share.tail or self._size) // share.block_size for share in self.shares)

    def length(self, rows: Sequence[Sequence[int]]) -> int:
        """Tokens that every group has a place for."""
        return min(len(rows[group.number]) * group.block_size for group in self.groups)

    def chunks(self, rows: Sequence[Sequence[int]], first: int, stop: int) -> list[int]:
        """The blocks of the chunks [first, stop), chunk by chunk, and of each group by group."""
        found: list[int] = np.concatenate(self._tables(rows, first, stop), axis=1).reshape(-1).tolist()
        return found

    def wanted(self, rows: Sequence[Sequence[int]], local: int, end: int) -> list[int]:
        """The same from the chunk with token `local` on up to token `end`, a chunk's; -1 for those before `local`, which vLLM has, and
        where it has none. ValueError if it counts on one that chunks do not have."""
        if end % self._size:
            raise ValueError(f"vLLM wants {end} tokens, which are not chunks of {self._size}")
        first, stop, tables, lacking = local // self._size, end // self._size, list[npt.NDArray[np.int64]](), 0
        for group, share in zip(self.groups, self.shares, strict=True):
            each, begin = self._size // group.block_size, local // group.block_size
            row = rows[group.number][begin : end // group.block_size]
            # What a window has passed comes first.
            passed = row.count(NULL)
            real = row[passed:]
            table = np.full((stop - first) * each, -1, dtype=np.int64)
            if real:
                table[begin + passed - first * each :] = real
            tables.append(table.reshape(-1, each)[:, -share.of(self._size) :])
            lacking += len(real) - int((tables[-1] > NULL).sum())
        if lacking:
            raise ValueError(f"of tokens {local} to {end} vLLM wants {lacking} blocks that chunks of {self._size} do not have")
        found: list[int] = np.concatenate(tables, axis=1).reshape(-1).tolist()
        return found

    def alive_from(self, rows: Sequence[Sequence[int]], computed: int, first: int, stop: int) -> int:
        """The first of the chunks [first, stop) from which on vLLM has given no block away before a step that begins with so many tokens
        computed; `stop` if there is none."""
        dead = (np.concatenate(self._tables(rows, first, stop), axis=1) == NULL).any(axis=1)
        ends = np.arange(first + 1, stop + 1) * self._size
        for group, share in zip(self.groups, self.shares, strict=True):
            if group.window:
                gone = (computed - group.window + 1) // group.block_size * group.block_size
                dead |= ends - (share.tail or self._size) < gone
        return first + int(np.flatnonzero(dead)[-1]) + 1 if dead.any() else first

    def _tables(self, rows: Sequence[Sequence[int]], first: int, stop: int) -> list[npt.NDArray[np.int64]]:
        """Of each group its blocks of these chunks, one chunk a row."""
        found = []
        for group, share in zip(self.groups, self.shares, strict=True):
            each = self._size // group.block_size
            row = np.array(rows[group.number][first * each : stop * each], dtype=np.int64).reshape(stop - first, each)
            found.append(row[:, -share.of(self._size) :])
        return found


def several(kv_cache_config: Any) -> bool:
    """Whether it takes `Groups` to say which blocks are whose: not where all layers look at all tokens by one block table."""
    kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    return len(kinds) > 1 or kinds == [_WINDOWED]


def hidden(kv_cache_config: Any) -> bool:
    """Whether the scheduler cannot see what this worker's half refuses: of pages of several sizes vLLM shows it one."""
    return any(type(group.kv_cache_spec).__name__ == _SIZES for group in kv_cache_config.kv_cache_groups)


def read(kv_cache_config: Any, chunk_size: int) -> Groups:
    """The groups of an instance. LayoutError, in one line, for what cannot be cached."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise LayoutError("the model keeps nothing of its tokens: nothing to change")
    for group in groups:
        reason = unknown(type(group.kv_cache_spec).__name__)
        if reason is None and not (getattr(group.kv_cache_spec, "prefix_cacheable", True) and _ordinary(group)):
            reason = "its blocks are no part of vLLM's own prefix cache: nothing to change"
        if reason is None and len(groups) > 1 and getattr(group, "is_eagle_group", False):
            reason = "a draft model's layers beside groups of others are not cached: start vLLM without --speculative-config"
        if reason is not None:
            raise LayoutError(f"{group.layer_names[0] if group.layer_names else 'a group'} and its group: {reason}")
    return Groups([_group(number, group) for number, group in enumerate(groups)], chunk_size)


def is_full(kind: str) -> bool:
    """Whether layers of this kind look at all tokens."""
    return kind in _FULL


def unknown(kind: str) -> str | None:
    """Why layers of this kind, a class of vLLM's `kv_cache_interface`, cannot be cached, and what to change; None if they can."""
    if kind in (*_FULL, _WINDOWED):
        return None
    return _REASONS.get(kind, f"the KV cache is {kind}, whose blocks do not hold the whole prefix: nothing to change")


def _ordinary(group: Any) -> bool:
    return not getattr(group, "host_resident", False) and getattr(group, "enable_kv_transfer", True)


def _group(number: int, group: Any) -> LayerGroup:
    spec = group.kv_cache_spec
    window = 0
    if type(spec).__name__ == _WINDOWED:
        window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    return LayerGroup(number, int(spec.block_size), window, tuple(group.layer_names))


def _tail(group: LayerGroup, chunk_size: int) -> int:
    """Of how many tokens at a chunk's end a hit that ends there, or later, can need the blocks; 0: of all."""
    blocks = -(-(group.window - 1) // group.block_size) if group.window else 0
    return blocks * group.block_size if 0 < blocks * group.block_size < chunk_size else 0
