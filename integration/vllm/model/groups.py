"""Groups of layers with separate block tables: which blocks a hit needs in place, which blocks a
chunk of the pool holds, and which a request still has.

Does not import vLLM: reads only numbers and type names from vLLM's objects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.protocol.messages import BlockTable
from vcache_backend.vram_pool.copies.geometry import PagedKV, Share

from .weights import digest, text

NULL = 0
"""vLLM's null block. It replaces blocks in a block table once a window has passed."""
Kind = Literal["full", "window", "state", "local"]
_KINDS: dict[str, Kind] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window",
    "ChunkedLocalAttentionSpec": "local",
    "MambaSpec": "state",
}
"""By the name of vLLM's specification. `state`: a state in place of tokens (Mamba, gated delta
nets, short convolutions)."""
_LOCAL = (
    "chunked local attention is shared in place only: leave out connector.share, or set "
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=0"
)
"""Why no chunk of the pool can hold it: vLLM gives its blocks back while their request runs."""
_ENCODER = "an encoder's output depends on the whole input: no setting changes that"
_REASONS = {
    "CrossAttentionSpec": _ENCODER,
    "EncoderOnlyAttentionSpec": _ENCODER,
    "SinkFullAttentionSpec": "its blocks also hold the model's sinks: no setting changes that",
    "RSWASpec": (
        "a reference window gives an answer's blocks back while their request runs: no setting "
        "changes that"
    ),
}
"""Why layers of other specifications are not cached."""


class LayerGroup(NamedTuple):
    """Layers that share a block table."""

    number: int
    """The group's number in vLLM."""
    block_size: int
    """In tokens."""
    layers: tuple[str, ...] = ()
    kind: Kind = "full"
    """To which tokens the layers attend, or `state`."""
    span: int = 0
    """Of `window`: how many tokens the layers attend to, with the current token and `retained`. Of
    `local`: the tokens of an attention chunk."""
    retained: int = 0
    """Extra tokens before the window whose blocks vLLM keeps, though no layer attends to them."""
    state: str = ""
    """A digest of the kind of state; empty if the layers keep tokens."""

    def __str__(self) -> str:
        """The group's kind and block size."""
        return f"{self.kind}{self.span or self.state}/{self.block_size}"

    @property
    def full(self) -> bool:
        """Whether the layers attend to all tokens."""
        return self.kind == "full"

    def table(self, hash_block: int) -> BlockTable:
        """Describe the group for the server. hash_block: tokens of a hash."""
        size = self.block_size
        window = max(1, -(-(self.span - 1 - self.retained) // size))
        reach = {"full": 0, "window": window, "state": 1, "local": self.span // size}
        return BlockTable(self.kind, size // hash_block, reach[self.kind])

    def needed(self, end: int) -> int:
        """The first block that a hit of `end` tokens needs: this block and all blocks up to `end`.
        end: a multiple of the block size."""
        blocks, reach = end // self.block_size, self.table(self.block_size).reach
        if self.kind == "local":
            return blocks // reach * reach
        return max(0, blocks - reach) if reach else 0

    def blocks(self, rows: Sequence[Any], begin: int, end: int) -> Any:
        """The group's blocks with the tokens [begin, end)."""
        return rows[self.number][begin // self.block_size : end // self.block_size]


class Span(NamedTuple):
    """The blocks [first, first + length) of a table (by its place in `Groups.all`), as blocks [at,
    at + length) of a load. had: how many of the first ones the load leaves out; None: others, too.
    """

    table: int
    first: int
    at: int
    length: int
    had: int | None


class Groups:
    """The block tables of one instance, one for each group of layers. Immutable; equal in the
    scheduler and in the workers.

    A chunk's blocks are listed group by group, the blocks of several chunks chunk by chunk. Methods
    take `rows`, a request's block tables by vLLM's group number.

    Chunks do not contain states. If vLLM has the state after a chunk's last token, one block of
    each group in `states`, it is stored as `parts` further chunks with separate keys (vLLM's pages
    have one size)."""

    def __init__(
        self, groups: Sequence[LayerGroup], chunk_size: int, sizes: Sequence[int] = ()
    ) -> None:
        """chunk_size: in tokens. sizes: tokens of a block, by vLLM's group number, if vLLM has more
        groups. LayoutError if a chunk does not consist of whole blocks of each group."""
        self.all = list(groups)
        """In vLLM's order."""
        tokens = [group for group in groups if not group.state]
        self.groups = sorted(tokens, key=lambda group: (not group.full, group.number))
        """The groups that keep tokens; those that attend to all tokens come first."""
        self.states = [group for group in groups if group.state]
        self.sizes = list(sizes) or [group.block_size for group in groups]
        """Tokens of a block, by vLLM's group number."""
        self.block = math.lcm(*self.sizes)
        self.size = chunk_size
        if chunk_size % self.block:
            fitting = -(-chunk_size // self.block) * self.block
            misfit = f"chunk_size {chunk_size} is not a multiple of {self.block} tokens"
            advice = f"set engine.chunk_size (with LMCache: chunk_size) to {fitting}"
            raise LayoutError(f"{misfit}: {advice}")
        self.shares = [Share(group.block_size, _tail(group, chunk_size)) for group in self.groups]
        """A chunk's part in each group."""
        self.blocks = sum(share.of(chunk_size) for share in self.shares)
        """The number of a chunk's blocks, over all groups. Each block takes as many bytes as a
        block of the group with the most layers."""
        self.parts = -(-len(self.states) // max(1, self.blocks))
        """How many chunks a state occupies."""
        self.plain = len(groups) == 1 and self.all[0].full
        """The only table's layers attend to all tokens."""
        self.whole = self.block if self.plain else chunk_size
        """Hits of the pool end at multiples of this many tokens; in place, of `block`."""

    @property
    def text(self) -> str:
        """The groups' kinds and block sizes, equal in instances that share. Empty if `plain`."""
        return "" if self.plain else " ".join(map(str, [*self.groups, *self.states]))

    @property
    def layers(self) -> str:
        """A digest of the layers' names, group by group, in a chunk's order."""
        return digest([list(group.layers) for group in [*self.groups, *self.states]])

    def describe(self, kv_caches: Mapping[str, Tensor], num_blocks: int) -> PagedKV:
        """Describe the geometry of a worker's `kv_caches`, vLLM's view of each layer.

        num_blocks: vLLM's number. LayoutError if blocks do not match vLLM's, or are not whole
        pages."""
        held, states = (
            [
                {name: kv_caches[name] for name in group.layers if name in kv_caches}
                for group in kind
            ]
            for kind in (self.groups, self.states)
        )
        # The attention kernel may cut vLLM's blocks. A pipeline stage may lack a group's layers;
        # the group's blocks are then cut like all other blocks.
        counts = {len(cache) for layers in held for cache in layers.values()}
        split = max((count // num_blocks for count in counts if count % num_blocks == 0), default=1)
        shares = [share._replace(block_size=share.block_size // split) for share in self.shares]
        # vLLM 0.31 and later show a layer with these axes, in any memory order. A state's view has
        # one head and no tokens.
        kv = PagedKV.describe_groups(
            list(zip(held, shares, strict=True)), axes="block head token dim"
        )
        if kv.num_blocks != num_blocks * split:
            raise LayoutError(
                f"KV caches have {kv.num_blocks} blocks of {kv.block_size} tokens where vLLM hands "
                f"out {num_blocks} of {self.groups[0].block_size}"
            )
        return kv.with_states(states, split)

    def spans(
        self, rows: Sequence[list[int]], begin: int, local: int, end: int
    ) -> tuple[list[int], list[Span]]:
        """List the blocks to load in place for the tokens [local, end), and where each table's
        blocks are in this list. Tables that attend to all tokens come first, from `begin` on.

        begin, local, end: multiples of all blocks, except an `end` within the last block of a
        model with one table; begin <= local. -1 stands for a block before `local`, which vLLM has,
        and for a block that vLLM does not want."""
        listed, spans = list[int](), list[Span]()
        for group in [*self.groups, *self.states]:
            size, table, full = group.block_size, self.all.index(group), group.full
            first = begin // size if full else max(group.needed(end), local // size)
            row, had = rows[group.number][first : -(-end // size)], max(0, local // size - first)
            row[:had] = [-1] * had
            if not full:
                row = [number or -1 for number in row]
                had = next((at for at, number in enumerate(row) if number >= 0), len(row))
            whole = full or row.count(-1) == had
            spans.append(Span(table, first, len(listed), len(row), had if whole else None))
            listed += row
        return listed, spans

    def length(self, rows: Sequence[Sequence[int]]) -> int:
        """How many of the request's tokens have blocks in every group."""
        return min(len(rows[group.number]) * group.block_size for group in self.groups)

    def chunks(self, rows: Sequence[list[int]], first: int, stop: int) -> list[int]:
        """The blocks of the chunks [first, stop)."""
        begin, end = first * self.size, stop * self.size
        return self._listed([group.blocks(rows, begin, end) for group in self.groups])

    def wanted(self, rows: Sequence[list[int]], local: int, end: int) -> list[int]:
        """List the blocks to load for the tokens [local, end), from the chunk with token `local`
        on, in the order of `chunks`, then the blocks of the state at `end`.

        end: a multiple of `whole`. -1 stands for blocks before `local`, which vLLM has, and for
        blocks that vLLM does not want. ValueError if vLLM wants a block that chunks do not hold."""
        if end % self.whole:
            raise ValueError(f"vLLM wants {end} tokens, which is not a multiple of {self.whole}")
        columns: list[list[int]] = []
        begin = local // self.size * self.size
        for group, share in zip(self.groups, self.shares, strict=True):
            block, row = group.block_size, group.blocks(rows, begin, end)
            for own in range(local // block - begin // block):
                row[own] = -1
            if group.kind == "window":
                row = [number if number != NULL else -1 for number in row]
                self._refuse_earlier(row, self.size // block, share.of(self.size))
            columns.append(row)
        blocks = self._listed(columns)
        if self.states:
            blocks += self._state_wanted(rows, local, end)
        return blocks

    def state(self, rows: Sequence[Sequence[int]], end: int) -> list[int]:
        """The blocks of the state after `end` tokens, from the state groups that have it."""
        ends = [group.blocks(rows, end - group.block_size, end) for group in self.states]
        return [block for row in ends for block in row if block != NULL]

    def ended(
        self, rows: Sequence[Sequence[int]], reached: int, offered: Sequence[tuple[int, int, int]]
    ) -> dict[int, list[int]]:
        """List the states at chunks' ends that can be stored after a step that reaches `reached`
        tokens: by tokens, the blocks.

        These are the step's last state, and the states in `offered`, vLLM's list of (group, block,
        tokens)."""
        ends = {} if reached % self.size else {reached: self.state(rows, reached)}
        for tokens in {tokens for _, _, tokens in offered if not tokens % self.size}:
            held = {group: block for group, block, end in offered if end == tokens}
            ends[tokens] = [held[group.number] for group in self.states if group.number in held]
        return {
            tokens: blocks for tokens, blocks in ends.items() if len(blocks) == len(self.states)
        }

    def alive_from(
        self, rows: Sequence[Sequence[int]], computed: int, first: int, stop: int
    ) -> int:
        """The first of the chunks [first, stop) from which on the request still has all blocks.

        computed: the tokens before the step. Returns `stop` without such a chunk."""
        alive = first
        for group, share in zip(self.groups, self.shares, strict=True):
            if group.kind != "window":
                continue
            gone = (computed - group.span + 1) // group.block_size * group.block_size
            for chunk in range(alive, stop):
                end = (chunk + 1) * self.size
                begin = end - (share.tail or self.size)
                if begin < gone or NULL in group.blocks(rows, begin, end):
                    alive = chunk + 1
        return alive

    # ---- inside

    def _state_wanted(self, rows: Sequence[Sequence[int]], local: int, end: int) -> list[int]:
        """The blocks of the state at `end`, padded with -1 to whole chunks. ValueError unless vLLM
        wants exactly these blocks: in the last block of [local, end), and none before."""
        state = self.state(rows, end)
        before = [group.blocks(rows, local, end - group.block_size) for group in self.states]
        if len(state) < len(self.states) or any(map(any, before)):
            raise ValueError(f"vLLM wants other states than the one at token {end}")
        return state + [-1] * (self.parts * self.blocks - len(state))

    def _listed(self, columns: list[list[int]]) -> list[int]:
        """Bring the blocks of consecutive chunks into the order of chunks. columns: the chunks'
        blocks, by group."""
        if len(columns) == 1 and not self.shares[0].tail:
            return columns[0]
        kept = [
            (row, self.size // share.block_size, share.of(self.size))
            for row, share in zip(columns, self.shares, strict=True)
        ]
        ends = range(max(-(-len(row) // each) for row, each, _ in kept))
        return [
            number
            for end in ends
            for row, each, held in kept
            for number in row[(end + 1) * each - held : (end + 1) * each]
        ]

    def _refuse_earlier(self, row: list[int], each: int, held: int) -> None:
        """Raise ValueError if vLLM wants a block before the last `held` blocks of a chunk."""
        lacking = sum(number >= 0 for at, number in enumerate(row) if at % each < each - held)
        if lacking:
            raise ValueError(f"vLLM wants {lacking} blocks that chunks of {self.size} do not have")


def several(kv_cache_config: Any) -> bool:
    """Whether the model has several block tables, or a single table of a sliding window."""
    kinds = [kind(group.kv_cache_spec)[0] for group in kv_cache_config.kv_cache_groups]
    return kinds != ["full"]


def fitting(kv_cache_config: Any, chunk_size: int) -> int:
    """The least multiple of all block sizes that is not less than `chunk_size`."""
    specs = [layer_specs(one.kv_cache_spec)[0] for one in kv_cache_config.kv_cache_groups]
    block = math.lcm(*(int(spec.block_size) for spec in specs))
    return -(-chunk_size // block) * block


def layer_specs(spec: Any) -> list[Any]:
    """The specifications of a table's layers. If pages have several sizes, a specification for each
    layer in workers, and the first of them in the scheduler; otherwise a single specification for
    all layers."""
    mixed = type(spec).__name__ == "UniformTypeKVCacheSpecs"
    return list(spec.kv_cache_specs.values()) if mixed else [spec]


def read(kv_cache_config: Any, chunk_size: int, in_place: bool = False) -> Groups:
    """Read an instance's groups from vLLM's `KVCacheConfig`. in_place: the KV cache is shared in
    place, not through a pool. LayoutError, in one line, if a group cannot be cached."""
    groups: dict[int, Any] = dict(enumerate(kv_cache_config.kv_cache_groups))
    sizes = [int(layer_specs(group.kv_cache_spec)[0].block_size) for group in groups.values()]
    if in_place:
        groups = {at: group for at, group in groups.items() if not computed_again(group)}
    for group in groups.values():
        if reason := _refusal(group, in_place):
            name = group.layer_names[0] if group.layer_names else "a group"
            raise LayoutError(f"{name} and its group: {reason}")
    layer_groups = [_group(number, group) for number, group in groups.items()]
    if all(group.state for group in layer_groups):
        raise LayoutError("no layer keeps KV of tokens: no setting changes that")
    return Groups(layer_groups, chunk_size, sizes)


def kind(spec: Any) -> tuple[str, int]:
    """Name the kind of layers of this specification, and the tokens of their window: `full`,
    `window`, `state`, or vLLM's name for other kinds."""
    spec = layer_specs(spec)[0]
    name = type(spec).__name__
    named = _KINDS.get(name, name)
    return named, int(spec.sliding_window) if named == "window" else 0


def computed_again(group: Any) -> bool:
    """Whether vLLM computes again what these layers need behind a hit, so that no hit needs their
    blocks: rings of keys that are not compressed yet, and windows with `bounded_replay`."""
    specs = layer_specs(group.kv_cache_spec)
    return not group.kv_cache_spec.prefix_cacheable and all(
        type(spec).__name__ == "CircularBufferSpec" or getattr(spec, "bounded_replay", False)
        for spec in specs
    )


def _refusal(group: Any, in_place: bool) -> str:
    """Say why a group cannot be cached, and what to change; empty if it can."""
    for spec in layer_specs(group.kv_cache_spec):
        name = type(spec).__name__
        if _KINDS.get(name) == "local" and not in_place:
            return _LOCAL
        if name not in _KINDS:
            lacks = "whose blocks do not hold the whole prefix: no setting changes that"
            return _REASONS.get(name, f"the KV cache is {name}, {lacks}")
        if getattr(spec, "non_causal", False):
            return "its KV depends on the whole prompt: no setting changes that"
        if _KINDS[name] == "state" and spec.mamba_cache_mode != "align":
            return (
                "vLLM keeps no states at blocks' ends: start it without "
                "--no-enable-prefix-caching and --mamba-cache-mode"
            )
        if _KINDS[name] == "state" and spec.num_speculative_blocks:
            return (
                "states contain speculated tokens before these are verified: start vLLM without "
                "--speculative-config"
            )
    moved = group.enable_kv_transfer and not group.host_resident
    if moved and group.kv_cache_spec.prefix_cacheable:
        return ""
    return "its blocks are not part of vLLM's own prefix cache: no setting changes that"


def _group(number: int, group: Any) -> LayerGroup:
    spec = layer_specs(group.kv_cache_spec)[0]
    size, names, named = int(spec.block_size), tuple(group.layer_names), _KINDS[type(spec).__name__]
    made = LayerGroup(number, size, names, named)
    if named == "window":
        retained = int(spec.extra_retained_tokens)
        return made._replace(span=int(spec.sliding_window) + retained, retained=retained)
    if named == "local":
        return made._replace(span=int(spec.attention_chunk_size))
    if named == "state":
        shapes, dtypes = list(map(list, spec.shapes)), list(map(str, spec.dtypes))
        return made._replace(state=digest([text(spec.mamba_type), shapes, dtypes]))
    return made


def _tail(group: LayerGroup, chunk_size: int) -> int:
    """How many tokens at a chunk's end have blocks that a hit may need; 0: all tokens."""
    if group.kind != "window":
        return 0
    # Whole blocks before a token that the window touches.
    tokens = -(-(group.span - 1) // group.block_size) * group.block_size
    return tokens if tokens < chunk_size else 0
