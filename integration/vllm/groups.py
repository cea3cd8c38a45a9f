"""The groups of a model's layers that have block tables of their own: what a chunk has of each, which of it a hit needs, and what of it is
still there.

Of vLLM's objects only the names of their types and their numbers are looked at: this imports no vLLM, and runs where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.paged import Share

from .weights import digest, text

Bools = npt.NDArray[np.bool_]
NULL = 0
"""vLLM's block of nobody, where a window has passed."""
STATES = "MambaSpec"
"""vLLM's kind of layers that keep a state, not tokens: Mamba's, gated delta nets', short convolutions'."""
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOWED = "SlidingWindowSpec"
_SIZES = "UniformTypeKVCacheSpecs"
_REASONS: Mapping[str, str] = {
    "ChunkedLocalAttentionSpec": (
        "chunked local attention gives blocks back while their request runs: unset VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
    ),
    _SIZES: "layers of one block table have pages of several sizes: nothing to change, unless a draft model's are among them",
    "CrossAttentionSpec": "an encoder's output is nobody's prefix: nothing to change",
    "EncoderOnlyAttentionSpec": "an encoder's output is nobody's prefix: nothing to change",
}


class LayerGroup(NamedTuple):
    """number: vLLM's. block_size: in tokens. window: tokens that its layers look back at, the next one's own with them, and those that
    vLLM keeps beside; 0: all there are. state: what its layers keep in place of tokens, as text; empty if they keep tokens."""

    number: int
    block_size: int
    window: int
    layers: tuple[str, ...] = ()
    state: str = ""


class Groups:
    """Those of one instance, those that look at all tokens first. Immutable; the same in the scheduler and in workers.

    block: tokens that are whole blocks of all of them. place: of which the blocks of all are made. size: tokens of a chunk. shares: what
    a chunk has of each. Rows: a request's blocks, by vLLM's number of the group.

    states: those whose layers keep a state. A chunk has nothing of them. The state behind its last token, a block of each, is stored
    where vLLM has it, as `parts` chunks more of their own keys: vLLM's pages are all of one size.
    """

    def __init__(self, groups: Sequence[LayerGroup], chunk_size: int) -> None:
        """LayoutError if chunks are not made of whole blocks of each."""
        tokens = [group for group in groups if not group.state]
        self.groups = sorted(tokens, key=lambda group: (group.window > 0, group.number))
        self.states = [group for group in groups if group.state]
        sizes = [group.block_size for group in groups]
        self.block, self.place, self.size = math.lcm(*sizes), math.gcd(*sizes), chunk_size
        if chunk_size % self.block:
            fitting = -(-chunk_size // self.block) * self.block
            raise LayoutError(f"chunk_size {chunk_size} is no multiple of {self.block} tokens: set engine.chunk_size: {fitting}")
        self.shares = tuple(Share(group.block_size, _tail(group, chunk_size)) for group in self.groups)

    @property
    def text(self) -> str:
        """Their kinds, on which two instances must agree."""
        kinds = (f"window{group.window}" if group.window else "full" for group in self.groups)
        named = [f"{kind}/{group.block_size}" for kind, group in zip(kinds, self.groups, strict=True)]
        return " ".join(named + [f"state-{group.state}/{group.block_size}" for group in self.states])

    @property
    def layers(self) -> str:
        """A digest of what they are called, group by group, in the order in which a chunk holds them."""
        return digest([list(group.layers) for group in [*self.groups, *self.states]])

    @property
    def blocks(self) -> int:
        """Of a chunk, all groups' together. Each is as large as the pages of the widest group's layers."""
        return sum((share.tail or self.size) // share.block_size for share in self.shares)

    @property
    def parts(self) -> int:
        """Chunks that a state takes."""
        return -(-len(self.states) // self.blocks) if self.states else 0

    @property
    def lead(self) -> int:
        """Of a chunk's blocks, which every hit needs that goes on behind it: those of groups that look at all tokens. They come first."""
        return sum(share.of(self.size) for group, share in zip(self.groups, self.shares, strict=True) if not group.window)

    def reach(self, right: Bools) -> tuple[int, int]:
        """right: of consecutive chunks, a row each, which blocks are there; vLLM has what is before, if anything. How many of the chunks a
        hit may have: the first ones, as far as all have what every hit needs, and at its end the windows too; and how many it had if
        all windows were there."""
        lacking = np.flatnonzero(~right[:, : self.lead].all(axis=1))
        most = int(lacking[0]) if len(lacking) else len(right)
        ends, chunks = np.ones(most, dtype=np.bool_), np.arange(1, most + 1)
        for columns, need in self._windows():
            there = right[:most, columns].reshape(-1)
            at, each = np.arange(len(there)), columns.stop - columns.start
            run = at - np.maximum.accumulate(np.where(there, -1, at))
            ends &= run[each - 1 :: each] >= np.minimum(need, chunks * each)
        hits = np.flatnonzero(ends)
        return (int(hits[-1]) + 1 if len(hits) else 0), most

    def needed(self, chunks: int) -> Bools:
        """Of so many chunks, a row each, the blocks that a hit needs which ends with the last one."""
        needed = np.zeros((chunks, self.blocks), dtype=np.bool_)
        needed[:, : self.lead] = True
        for columns, need in self._windows():
            there = np.zeros((chunks, columns.stop - columns.start), dtype=np.bool_)
            there.reshape(-1)[max(0, there.size - need) :] = True
            needed[:, columns] = there
        return needed

    def window(self, rows: Sequence[npt.NDArray[Any]], chunks: int) -> list[npt.NDArray[Any]]:
        """Of each group with a window, what its row has for the blocks that a hit of so many chunks needs."""
        found = []
        for group in self.groups:
            if group.window:
                end = chunks * self.size // group.block_size
                found.append(rows[group.number][max(0, end - _looked_back(group)) : end])
        return found

    def most_blocks(self, tokens: int) -> int:
        """All that a request of so many tokens may take as it begins: of tables of states the one that is loaded, the one it goes on in,
        one for a state from within the step, and a copy."""
        return sum(-(-tokens // group.block_size) for group in self.groups) + 4 * len(self.states)

    def length(self, rows: Sequence[Sequence[int]]) -> int:
        """Tokens that every group has a place for."""
        return min(len(rows[group.number]) * group.block_size for group in self.groups)

    def chunks(self, rows: Sequence[Sequence[int]], first: int, stop: int) -> list[int]:
        """The blocks of the chunks [first, stop), chunk by chunk, and of each group by group."""
        found: list[int] = self.table(rows, first, stop).reshape(-1).tolist()
        return found

    def wanted(self, rows: Sequence[Sequence[int]], local: int, end: int) -> list[int]:
        """The same from the chunk with token `local` on up to token `end`, a chunk's, and the state there; -1 for those before `local`,
        which vLLM has, and where it has none. ValueError if it counts on one that chunks do not have."""
        if end % self.size:
            raise ValueError(f"vLLM wants {end} tokens, which are not chunks of {self.size}")
        first, stop, tables, lacking = local // self.size, end // self.size, list[npt.NDArray[np.int64]](), 0
        for group, share in zip(self.groups, self.shares, strict=True):
            each, begin = self.size // group.block_size, local // group.block_size
            row = rows[group.number][begin : end // group.block_size]
            # What a window has passed comes first.
            passed = row.count(NULL)
            real = row[passed:]
            table = np.full((stop - first) * each, -1, dtype=np.int64)
            if real:
                table[begin + passed - first * each :] = real
            tables.append(table.reshape(-1, each)[:, -share.of(self.size) :])
            lacking += len(real) - int((tables[-1] > NULL).sum())
        if lacking:
            raise ValueError(f"of tokens {local} to {end} vLLM wants {lacking} blocks that chunks of {self.size} do not have")
        state = self.state(rows, end)
        # What vLLM goes on from it has in the last block, and in none before.
        if len(state) < len(self.states) or any(
            any(rows[group.number][local // group.block_size : end // group.block_size - 1]) for group in self.states
        ):
            raise ValueError(f"vLLM wants other states than the one at token {end}")
        found: list[int] = np.concatenate(tables, axis=1).reshape(-1).tolist()
        return found + state + [-1] * (self.parts * self.blocks - len(state))

    def state(self, rows: Sequence[Sequence[int]], end: int) -> list[int]:
        """The blocks in which the layers that keep states have those behind token `end`; fewer than there are groups if some have not."""
        found = [rows[group.number][end // group.block_size - 1 : end // group.block_size] for group in self.states]
        return [block for row in found for block in row if block != NULL]

    def running(self, rows: Sequence[Sequence[int]], end: int) -> list[int]:
        """The blocks in which the step goes on that begins with `end` tokens: vLLM has copied the state there into them. ValueError if it
        has none."""
        found = [row[-1] for row in (rows[group.number][end // group.block_size :] for group in self.states) if row]
        if len(found) < len(self.states) or NULL in found:
            raise ValueError(f"vLLM has no block in which it goes on from token {end}")
        return found + [-1] * (self.parts * self.blocks - len(found))

    def ended(self, rows: Sequence[Sequence[int]], reached: int, offered: Sequence[tuple[int, int, int]]) -> dict[int, list[int]]:
        """Which states at chunks' ends, by their tokens, are in which blocks when the step is over that has computed `reached` tokens: the
        one it ends with, which the next step copies on from there, and those that vLLM says it has: group, block, tokens."""
        ends = {} if reached % self.size else {reached: self.state(rows, reached)}
        for tokens in {tokens for _, _, tokens in offered if not tokens % self.size}:
            there = {group: block for group, block, end in offered if end == tokens}
            ends[tokens] = [there[group.number] for group in self.states if group.number in there]
        return {tokens: blocks for tokens, blocks in ends.items() if len(blocks) == len(self.states)}

    def alive_from(self, rows: Sequence[Sequence[int]], computed: int, first: int, stop: int) -> int:
        """The first of the chunks [first, stop) from which on vLLM has given no block away before a step that begins with so many tokens
        computed; `stop` if there is none."""
        dead = (self.table(rows, first, stop) == NULL).any(axis=1)
        ends = np.arange(first + 1, stop + 1) * self.size
        for group, share in zip(self.groups, self.shares, strict=True):
            if group.window:
                gone = (computed - group.window + 1) // group.block_size * group.block_size
                dead |= ends - (share.tail or self.size) < gone
        return first + int(np.flatnonzero(dead)[-1]) + 1 if dead.any() else first

    def table(self, rows: Sequence[Sequence[int] | npt.NDArray[Any]], first: int, stop: int) -> npt.NDArray[np.int64]:
        """The same, one chunk a row; or what else there is of each block in `rows`."""
        found = []
        for group, share in zip(self.groups, self.shares, strict=True):
            each = self.size // group.block_size
            row = np.array(rows[group.number][first * each : stop * each], dtype=np.int64).reshape(stop - first, each)
            found.append(row[:, -share.of(self.size) :])
        return np.concatenate(found, axis=1)

    def _windows(self) -> Iterator[tuple[slice, int]]:
        """Of each group with a window: which blocks of a chunk are its, and how many at a hit's end are needed."""
        start = 0
        for group, share in zip(self.groups, self.shares, strict=True):
            stop = start + share.of(self.size)
            if group.window:
                yield slice(start, stop), _looked_back(group)
            start = stop


def several(kv_cache_config: Any) -> bool:
    """Whether it takes `Groups` to say which blocks are whose: not where all layers look at all tokens by one block table."""
    kinds = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    return len(kinds) > 1 or kinds == [_WINDOWED]


def keep_states(kv_cache_config: Any) -> bool:
    """Whether some layers keep a state."""
    return any(type(group.kv_cache_spec).__name__ == STATES for group in kv_cache_config.kv_cache_groups)


def hidden(kv_cache_config: Any) -> bool:
    """Whether the scheduler cannot see what this worker's half refuses: of pages of several sizes vLLM shows it one."""
    return any(type(group.kv_cache_spec).__name__ == _SIZES for group in kv_cache_config.kv_cache_groups)


def read(kv_cache_config: Any, chunk_size: int) -> Groups:
    """The groups of an instance. LayoutError, in one line, for what cannot be cached."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise LayoutError("the model keeps nothing of its tokens: nothing to change")
    for group in groups:
        reason = unknown(type(group.kv_cache_spec).__name__) or _unsteady(group.kv_cache_spec)
        if reason is None and not (getattr(group.kv_cache_spec, "prefix_cacheable", True) and _ordinary(group)):
            reason = "its blocks are no part of vLLM's own prefix cache: nothing to change"
        if reason is not None:
            raise LayoutError(f"{group.layer_names[0] if group.layer_names else 'a group'} and its group: {reason}")
    found = [_group(number, group) for number, group in enumerate(groups)]
    if all(group.state for group in found):
        raise LayoutError("all layers keep a state, and none keeps tokens: nothing to change")
    return Groups(found, chunk_size)


def is_full(kind: str) -> bool:
    """Whether layers of this kind look at all tokens."""
    return kind in _FULL


def unknown(kind: str) -> str | None:
    """Why layers of this kind, a class of vLLM's `kv_cache_interface`, cannot be cached, and what to change; None if they can."""
    if kind in (*_FULL, _WINDOWED, STATES):
        return None
    return _REASONS.get(kind, f"the KV cache is {kind}, whose blocks do not hold the whole prefix: nothing to change")


def _unsteady(spec: Any) -> str | None:
    """Why nobody can tell where vLLM has which state, if so."""
    if type(spec).__name__ != STATES:
        return None
    if spec.mamba_cache_mode != "align":
        return "vLLM keeps no states at blocks' ends: start it without --no-enable-prefix-caching and --mamba-cache-mode"
    if spec.num_speculative_blocks:
        return "tokens guessed ahead are in states before they are known to be right: start vLLM without --speculative-config"
    return None


def _ordinary(group: Any) -> bool:
    return not getattr(group, "host_resident", False) and getattr(group, "enable_kv_transfer", True)


def _group(number: int, group: Any) -> LayerGroup:
    spec = group.kv_cache_spec
    window, state = 0, ""
    if type(spec).__name__ == _WINDOWED:
        window = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
    elif type(spec).__name__ == STATES:
        state = digest([text(spec.mamba_type), [list(shape) for shape in spec.shapes], [str(dtype) for dtype in spec.dtypes]])
    return LayerGroup(number, int(spec.block_size), window, tuple(group.layer_names), state)


def _tail(group: LayerGroup, chunk_size: int) -> int:
    """Of how many tokens at a chunk's end a hit that ends there, or later, can need the blocks; 0: of all."""
    tokens = _looked_back(group) * group.block_size
    return tokens if 0 < tokens < chunk_size else 0


def _looked_back(group: LayerGroup) -> int:
    """Blocks before a token that its window looks at, at most; 0: all."""
    return -(-(group.window - 1) // group.block_size) if group.window else 0
