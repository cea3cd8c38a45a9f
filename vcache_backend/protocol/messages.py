"""The protocol: all messages on the socket, and nothing else.

A message is one packet of a Unix socket (SOCK_SEQPACKET): a MessagePack array that starts with the
message's name, `["contains", [key, ...]]`. The server answers the requests of a connection in
order, each with the reply type after the arrow in the request's docstring, or with `Error`. Fds
travel with their message as SCM_RIGHTS, `MAX_FDS` at most. A message with the wrong number of fds
is refused, and all of its fds are closed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Literal, NewType, Self, cast

import msgspec
from msgspec.structs import replace

PROTOCOL_VERSION = 31
MAX_MESSAGE_BYTES = 200_000
"""Linux sends a packet of this size with a socket's ordinary buffer. A client that sends a larger
packet is disconnected."""
MAX_KEYS = 2048
"""The most keys in one request. A request with more is refused; the connection stays usable."""
MAX_SLOTS = 1024
"""The most slots that one request reserves. Further keys are refused as FULL."""
MAX_FDS = 253
"""The most fds of one message, by Linux's limit."""
INSTANCE_BYTES = 16
MAX_PLANES = 1024
"""The most planes of one worker's KV cache. A plane is one part of one layer."""
MAX_KINDS = 16
"""The most kinds of layers, by the size of their pages, in one worker's KV cache."""
MAX_PUBLISHED = 2048
"""The most blocks of one publication, a few milliseconds of the server's time."""
MAX_HASHES = 8192
"""The most block hashes of one look-up."""
MAX_TABLES = 64
"""The most block tables of an instance."""
MAX_OWNERS = 64
"""The most rows of `ListSegments.reads`."""
MAX_REPLICAS = 2
"""The most resident copies of one chunk in an answer."""
MAX_BLOCKS = 1 << 21
"""The most blocks of an instance."""
MAX_EACH = 1024
"""The most block hashes of a chunk."""
MAX_RANKS = 64
"""The most workers of an instance."""
HASH_BYTES = 16
"""Bytes of a block hash: see `vcache_backend.transfer.keys`."""
NUMBER_BYTES = 4
GENERATION_BYTES = 8
"""Bytes of a block's number and generation, packed little-endian in some messages."""

ChunkKey = NewType("ChunkKey", bytes)
"""Namespace (8 bytes), prefix-chained token hash (16), rank (2, big-endian). See
`vcache_backend.transfer.keys`."""
SegmentId = NewType("SegmentId", str)
InstanceId = NewType("InstanceId", bytes)
"""Identifies one start of one EngineCore: 16 random bytes."""
SCHEDULER = -1
"""The scheduler's number where workers have a rank."""
Named = Annotated[InstanceId, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
Asker = Annotated[InstanceId, msgspec.Meta(max_length=INSTANCE_BYTES)]
"""An instance, or b"" for none."""
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Medium = Literal["cuda", "host"]
KEY_BYTES = 26
NAMESPACE_BYTES = 8
RANK_BYTES = 2
Namespace = Annotated[bytes, msgspec.Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Key = Annotated[ChunkKey, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=MAX_KEYS)]
_Id = Annotated[SegmentId, msgspec.Meta(max_length=64)]
NewId = Annotated[SegmentId, msgspec.Meta(pattern=r"\A[0-9A-Za-z_.:-]{1,64}\Z")]
MAX_SEGMENTS = 400
"""The most segments: a message lists all of them."""
MAX_SEGMENT_BYTES = 1 << 46
"""Larger than any allocation. A larger number is refused before any system call."""
SegmentBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_BYTES)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*\Z"
"""No control characters, separators of lines, or changes of the writing direction."""
Text = Annotated[str, msgspec.Meta(max_length=256, pattern=_PRINTABLE)]
Field = Annotated[str, msgspec.Meta(max_length=64, pattern=_PRINTABLE)]
MAX_REPORT_CHARS = 1024
MAX_TOKENS = 1 << 32
"""The most tokens that one message may report as looked up."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
MAX_PIN_SECONDS = 60.0
"""The longest time for which one request keeps chunks from eviction."""
MAX_RUNS = 1024
"""The most runs in one answer. An answer with more would exceed a message."""
Level = Literal["info", "warn", "error"]


def of_rank(keys: Sequence[ChunkKey], rank: int) -> list[ChunkKey]:
    """The keys of the same chunks for another rank. keys: all of one rank."""
    suffix = rank.to_bytes(RANK_BYTES, "big")
    if keys and keys[0].endswith(suffix):
        return list(keys)
    return [ChunkKey(key[:-RANK_BYTES] + suffix) for key in keys]


def of_ranks(keys: Sequence[ChunkKey], ranks: int) -> list[ChunkKey]:
    """The keys of the same chunks for all ranks, chunk by chunk. keys: of rank 0."""
    if ranks == 1:
        return list(keys)
    suffixes = [rank.to_bytes(RANK_BYTES, "big") for rank in range(ranks)]
    return [ChunkKey(key[:-RANK_BYTES] + suffix) for key in keys for suffix in suffixes]


def chunk_keys(namespace: bytes, hashes: bytes, each: int) -> list[ChunkKey]:
    """The keys (of rank 0) of the whole chunks in packed `hashes`, which begin with a chunk.
    each: hashes of a chunk, the last of which is in the key."""
    step, suffix = each * HASH_BYTES, bytes(RANK_BYTES)
    whole = memoryview(hashes)[: len(hashes) // step * step]
    ends = [end for (end,) in struct.iter_unpack(f"{step - HASH_BYTES}x{HASH_BYTES}s", whole)]
    # All at once, and without `ChunkKey`: that takes a quarter of the time.
    packed = namespace + (suffix + namespace).join(ends) + suffix if ends else b""
    return cast("list[ChunkKey]", [key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", packed)])


class Refusal(IntEnum):
    """Why a key got no slot. EXISTS and BUSY are no failures: the chunk is or will be stored."""

    EXISTS = 0
    BUSY = 1
    FULL = 2
    TOO_LARGE = 3
    NO_SEGMENT = 4


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot to write: `length` bytes at byte `offset` of `segment`."""

    segment: _Id
    offset: Offset
    length: SegmentBytes


class SegmentInfo(msgspec.Struct, frozen=True, array_like=True):
    """A segment. `device`: a GPU UUID, `host` or `host:NAME`. Sizes in bytes."""

    id: SegmentId
    device: str
    medium: Medium
    nbytes: int
    used: int = 0
    chunks: int = 0
    evictions: int = 0


class Reported(msgspec.Struct, frozen=True, array_like=True):
    """A `Report` in the server. `time`: seconds since the Unix epoch. `pid`: 0 if the client is in
    another pid namespace. `device`: from the connection's hello."""

    time: float
    level: Level
    pid: int
    device: str
    text: str


class Mismatch(msgspec.Struct, frozen=True, array_like=True):
    """A field that keeps connected instances of one model from sharing, since their values differ.
    `values`: each value with its instances. `advice`: what to set, unless the name says so."""

    model: str
    field: str
    values: list[tuple[str, list[str]]]
    advice: str


class LayerKind(msgspec.Struct, frozen=True, array_like=True):
    """Layers of a KV cache with pages of one size. Sizes in bytes.

    `parts`: pages of a layer's block. `stride`: from block to block, the same in all planes."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLANES)]
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLANES)]
    page_bytes: Bytes
    stride: Bytes


class CacheShape(msgspec.Struct, frozen=True, array_like=True):
    """A worker's paged KV cache, one allocation, as described to readers.

    `layout`: the order of bytes in a page; a reader needs the same layout. `kinds`: the layers,
    kind by kind. `num_blocks`, `block_size` (tokens): of the tensors. `planes`: for each kind,
    layer and part, in this order, the offset of the plane's block 0. `nbytes`: how many bytes of
    the fd a reader may map."""

    device: Field
    medium: Medium
    layout: Text
    kinds: Annotated[list[LayerKind], msgspec.Meta(min_length=1, max_length=MAX_KINDS)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    planes: Annotated[list[Offset], msgspec.Meta(max_length=MAX_PLANES)]
    nbytes: Bytes

    def misfit(self) -> str:
        """Why no cache can have this shape; empty if every page lies inside the allocation."""
        spans = list[int]()
        for kind in self.kinds:
            if self.num_blocks > 1 and kind.stride < kind.page_bytes:
                return f"pages of {kind.page_bytes:,} B every {kind.stride:,} B"
            if len(spans) + kind.layers * kind.parts > MAX_PLANES:
                return f"more than {MAX_PLANES} planes"
            span = (self.num_blocks - 1) * kind.stride + kind.page_bytes
            spans += [span] * (kind.layers * kind.parts)
        if len(self.planes) != len(spans):
            return f"{len(self.planes)} planes, but its layers have {len(spans)}"
        for plane, (offset, span) in enumerate(zip(self.planes, spans, strict=True)):
            if not 0 <= offset <= self.nbytes - span:
                return f"plane {plane} at bytes {offset:,} to {offset + span:,} of {self.nbytes:,}"
        return ""


class InstanceStats(msgspec.Struct, frozen=True, array_like=True):
    """An instance in the server. `id`: in hex; empty if the instance shares through the pool only.
    `device`: of the first worker. `pid`: of the scheduler, 0 if absent or not visible.

    `resident`: blocks that look-ups can return once `missing` is empty. `missing`: the first part
    that is not shown; look-ups skip the instance until all parts are. `name`: from the hello.
    `namespace`: in hex. `silent`: seconds since the last message of any process of the instance.
    `stopped`: the pid of a stopped process; 0 if none is stopped. `orphan`: the pid of the ended
    parent, a process of the same program (see `processes.spawner`); otherwise 0. `early`: its
    scheduler has looked nothing up yet. Workers show their KV caches with the first request.
    `vllm`: what is known of its vLLM (see `proofs.standing`); empty without one."""

    id: str
    device: str
    pid: int
    blocks: int
    resident: int
    ranks: int = 1
    missing: str = ""
    name: str = ""
    namespace: str = ""
    silent: float = 0.0
    stopped: int = 0
    orphan: int = 0
    early: bool = False
    vllm: str = ""


POOL = InstanceId(bytes(INSTANCE_BYTES))
"""In place of an instance: the pool."""


class Reads(msgspec.Struct, frozen=True, array_like=True):
    """How much a client has read out of the KV cache of `instance`, or out of the `POOL`, since the
    client's start: bytes and tokens that counted, and chunks refused because the owner had reused
    the blocks."""

    instance: Named
    nbytes: Number
    refused: Number
    tokens: Number = 0


class ReadStats(msgspec.Struct, frozen=True, array_like=True):
    """The `Reads` of a connected client: process `pid`, 0 if not visible, with its device.
    `instance`: in hex, or `pool`. `reader`: the client's own instance, in hex; empty if it shows
    none."""

    pid: int
    device: str
    instance: str
    nbytes: int
    refused: int
    tokens: int = 0
    reader: str = ""


# ---- requests


class BlockTable(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of an instance's block tables. `scale`: hashes of a block; the last of them names the
    block. `reach`: which blocks a hit that ends after E hashes needs: `full`: all (0). `window`:
    the last `reach` blocks, or all if there are fewer. `state`: the last block (1). `local`: the
    blocks after the last multiple of `reach` blocks, none at a multiple."""

    kind: Literal["full", "window", "state", "local"]
    scale: Annotated[int, msgspec.Meta(ge=1, le=MAX_EACH)] = 1
    reach: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)] = 0


class PackedRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive blocks of a KV cache, or slots of a segment, from number `first` on. `blocks`,
    `generations`: of each, packed in 4 and 8 bytes, little-endian. A block's or slot's number and
    its generation name one content for good."""

    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    blocks: bytes
    generations: bytes

    @property
    def count(self) -> int:
        return len(self.blocks) // NUMBER_BYTES

    @property
    def stop(self) -> int:
        return self.first + len(self.blocks) // NUMBER_BYTES

    def cut(self, first: int, stop: int) -> Self:
        """Return the run of the blocks [first, stop), a part of this run."""
        if (first, stop) == (self.first, self.stop):
            return self
        begin, end = first - self.first, stop - self.first
        blocks = self.blocks[begin * NUMBER_BYTES : end * NUMBER_BYTES]
        generations = self.generations[begin * GENERATION_BYTES : end * GENERATION_BYTES]
        return replace(self, first=first, blocks=blocks, generations=generations)

    def numbered(self, first: int) -> Self:
        """Return the same blocks, numbered from `first` on."""
        return self if first == self.first else replace(self, first=first)

    def fits(self) -> bool:
        """Whether there is one generation for each block, and at least one block."""
        count, rest = divmod(len(self.blocks), NUMBER_BYTES)
        return not rest and len(self.generations) == count * GENERATION_BYTES > 0


class BlockRun(PackedRun, frozen=True):
    """Blocks of one request in block table `table`. `hashes`: packed, 16 bytes for each block."""

    table: Annotated[int, msgspec.Meta(ge=0, lt=MAX_TABLES)]
    hashes: bytes

    def cut(self, first: int, stop: int) -> BlockRun:
        hashes = self.hashes[(first - self.first) * HASH_BYTES : (stop - self.first) * HASH_BYTES]
        return replace(super().cut(first, stop), hashes=hashes)


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all requests. `tag` is the name on the wire."""


class Hello(Request, frozen=True, tag="hello"):
    """The first message of a connection → `Welcome`, or `Error` and the connection closes.

    A pidfd of the client may come along. `layout`: the instance's layout as text, field by field
    (see `transfer.layout.Layout`); empty for tools. `token`: a number that the client keeps, which
    identifies the client where its pid is not visible. `name`: the instance's name for people, such
    as its port, `:8000`."""

    version: int
    device: Field
    medium: Medium
    layout: Annotated[dict[Field, str], msgspec.Meta(max_length=64)] = {}
    token: Number = 0
    name: Text = ""


class AddSegment(Request, frozen=True, tag="add_segment"):
    """Register a segment by its fd → `Count` of chunks of before a restart, with the fd of the
    segment's table: keep it, to map (`GenerationView.of_segment`) and to show to the next server.

    `again`: an earlier server had the segment; the fd of its table comes along as a second fd.
    Refused while that server has not ended, and for good once the table is dead."""

    id: NewId
    device: Field
    medium: Medium
    nbytes: SegmentBytes
    again: bool = False


class Lend(Request, frozen=True, tag="lend"):
    """How many bytes should this client allocate now as one segment, if the pool is to have
    `nbytes` on its device? → `Count` of bytes. They are claimed for this connection until it adds a
    segment, for some time at most. 0: the pool has the bytes, or other clients claim them; ask
    again later."""

    nbytes: Bytes


class OpenSegment(Request, frozen=True, tag="open_segment"):
    """Open a segment → `Opened`, with the fds of the segment and of its table."""

    id: SegmentId


class DropSegment(Request, frozen=True, tag="drop_segment"):
    """Stop using a segment, whose table is dead at once: reads under way fail → `Count` of its
    chunks. The server forgets them now or soon, and its memory is free once nobody uses it."""

    id: SegmentId


class ListSegments(Request, frozen=True, tag="list_segments"):
    """List the segments → `Segments`. A client's heartbeat, with news of the client.

    `asked`, `found`, `awaited` and `waited_ms` count since the client's last heartbeat: prompt
    tokens looked up, and found; tokens that another instance computed while a request waited; the
    time of these waits. Likewise `loads` that brought something, and the tokens that they brought,
    each counted by one rank. `reads`: what the client has read so far, by owner. `unmappable`: the
    segments that the client cannot map; its reservations get no slot there."""

    asked: Tokens = 0
    found: Tokens = 0
    awaited: Tokens = 0
    waited_ms: Tokens = 0
    loads: Tokens = 0
    loaded: Tokens = 0
    reads: Annotated[list[Reads], msgspec.Meta(max_length=MAX_OWNERS)] = []
    unmappable: Annotated[list[_Id], msgspec.Meta(max_length=1024)] = []


class Reserve(Request, frozen=True, tag="reserve"):
    """Ask for a slot of `nbytes` for each key, in prefix order → `Reserved`. Slots come from the
    client's device, then from peers, then by eviction."""

    keys: Keys
    nbytes: Bytes


class Commit(Request, frozen=True, tag="commit"):
    """Publish a reservation whose copies are over → `Count` of visible chunks (0: void).

    `prefix`: stored chunks before the reservation's. The prefix becomes more recent than the
    reservation, so that the end of a prefix is evicted first."""

    reservation: int
    prefix: Keys = []


class Abort(Request, frozen=True, tag="abort"):
    """Free a reservation's slots, into which no copy runs or will run → `Count` of slots."""

    reservation: int


class Pin(Request, frozen=True, tag="pin"):
    """Where in the pool are the leading chunks (keys of any rank)? Do not evict them for `seconds`
    from now on, make them recent, the first most of all → `Pinned`.

    A pin ends by itself and proves nothing: whoever copies a chunk compares its generation with the
    table afterwards."""

    keys: Keys
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_PIN_SECONDS)] = 0.0


class Contains(Request, frozen=True, tag="contains"):
    """Which of these chunks are in the pool? No effect on recency → `Present`."""

    keys: Keys


class Remove(Request, frozen=True, tag="remove"):
    """Forget chunks → `Count` removed. Reads under way fail."""

    keys: Keys


class Clear(Request, frozen=True, tag="clear"):
    """Forget every chunk of a namespace (8 bytes), or of all namespaces with b"", including chunks
    being written → `Count` of chunks that were visible.

    `reset`: the weights may have changed: also raise the epoch, which voids offloaded chunks."""

    namespace: Annotated[bytes, msgspec.Meta(max_length=NAMESPACE_BYTES)] = b""
    reset: bool = False


class Join(Request, frozen=True, tag="join"):
    """Register an instance's generation table, by its fd, from the scheduler → `Count` (1).

    `blocks`: vLLM's number of blocks, the length of the table. `each`: block hashes of a chunk.
    `tables`: vLLM's block tables, in order. Refused while another process is the instance's
    scheduler."""

    instance: Named
    namespace: Namespace
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]
    ranks: Ranks
    each: Annotated[int, msgspec.Meta(ge=1, le=MAX_EACH)]
    tables: Annotated[list[BlockTable], msgspec.Meta(min_length=1, max_length=MAX_TABLES)]


class ShowCache(Request, frozen=True, tag="show_cache"):
    """Register a worker's KV cache, by its fd, before or after the scheduler joined → `Count` (1).

    Refused while another process is this rank. Replaces the rank's earlier KV cache."""

    instance: Named
    rank: Rank
    shape: CacheShape


class OpenInstance(Request, frozen=True, tag="open_instance"):
    """Open an instance → `Joined`. Refused, like all `Open…` below, while a part of the instance is
    missing."""

    instance: Named


class OpenCache(Request, frozen=True, tag="open_cache"):
    """Open a worker's KV cache → `Cache`."""

    instance: Named
    rank: Rank


class Publish(Request, frozen=True, tag="publish"):
    """Publish blocks of one rank, to be read in place after the step that wrote them → `Count` of
    blocks.

    0: the instance has not joined, or `epoch` is old. Only on the connection that showed this
    rank's cache. `epoch`: the latest epoch that the scheduler had heard of when the blocks were
    computed. Blocks of one hash and table stand in for each other. Look-ups return a block while
    the instance's table has its generation, and once all ranks have published it."""

    instance: Named
    rank: Rank
    runs: Annotated[list[BlockRun], msgspec.Meta(max_length=MAX_PUBLISHED)]
    epoch: int = 0


QUEUED_SECONDS = 0.1
"""If a promise is not confirmed for this time, its request waits in vLLM's queue. A request that
begins has mostly asked at most 50 ms before, and confirms within 20 ms more."""


class Find(Request, frozen=True, tag="find"):
    """How many of a prompt's leading tokens can be read, where, and which of the next chunks is
    another instance computing? → `Found`.

    `hashes`: of the prompt's blocks, `HASH_BYTES` each, from a multiple of `each` on; with several
    block tables, and with one of a window, from the prompt's first block on. `each`: hashes of a
    chunk. The last hash of a chunk is in the chunk's key. `limit`: hits end at most at this number
    of hashes. `ranks`: pool chunks count if all ranks have stored them. `instance`: the asker's
    instance, which the answer leaves out; b"" for none. `pool_only`: leave out all instances.
    `promise`: if no other instance has promised the first missing chunk, note all missing chunks as
    promised by this connection under this number (see `Promise`); 0: note nothing. `begins`: vLLM
    is scheduling the request, so it takes over promises of queued requests (`QUEUED_SECONDS`)."""

    namespace: Namespace
    hashes: Annotated[bytes, msgspec.Meta(max_length=MAX_HASHES * HASH_BYTES)]
    each: Annotated[int, msgspec.Meta(ge=1, le=MAX_EACH)]
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_HASHES)]
    ranks: Ranks = 1
    instance: Asker = InstanceId(b"")
    pool_only: bool = False
    promise: Number = 0
    begins: bool = False


class Promise(Request, frozen=True, tag="promise"):
    """A request has begun to compute these chunks (keys of rank 0), or will compute them after the
    chunks that it loads now (`begun` false) → `Promised`. Replaces the earlier promise of the same
    number. No keys: the request computes no more, or has ended. Number 0, no keys: so have all.

    The server leaves out chunks that `instance` has published already, or that are in the pool for
    all `ranks` ranks. `instance`: the client's instance; b"" if it shares nothing in place.
    `epoch`: of the namespace when the request began. With an old epoch the server promises nothing.

    `chunk_seconds`: how long the instance takes for a chunk, by its last prompts; 0: not measured
    yet."""

    number: Number
    keys: Keys = []
    ranks: Ranks = 1
    instance: Asker = InstanceId(b"")
    epoch: int = 0
    chunk_seconds: Seconds = 0.0
    begun: bool = True


class Stats(Request, frozen=True, tag="stats"):
    """→ `ServerStats`."""


class Report(Request, frozen=True, tag="report"):
    """Send a line to the node's operator, such as why an instance caches nothing → `Count`: 1, or 0
    if this connection has sent the line before. The server logs reports, and keeps the newest."""

    level: Level
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REPORT_CHARS)]


# ---- replies


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all replies."""


class Welcome(Reply, frozen=True, tag="welcome"):
    """The hello was accepted. `run_id`: changes with every start of the server. `mismatches`: for
    each other namespace of the model, a line that says why the client cannot share with it."""

    run_id: int
    mismatches: list[str]


class Error(Reply, frozen=True, tag="error"):
    """The request was refused. `fatal`: the server closes the connection."""

    message: str
    fatal: bool = False


class Opened(Reply, frozen=True, tag="opened"):
    """A segment. Its fd and its table's fd come along, in this order."""

    segment: SegmentInfo


class Reserved(Reply, frozen=True, tag="reserved"):
    """A location or a `Refusal` for each key. `reservation`: 0 if no slot was reserved. `seconds`:
    how long the client may take to commit. `reason`: explains a FULL, TOO_LARGE or NO_SEGMENT.
    `epoch`: of the keys' namespace."""

    reservation: int
    seconds: float
    slots: list[Location | int]
    reason: str = ""
    epoch: int = 0


class SlotRun(PackedRun, frozen=True):
    """Consecutive chunks of an answer in one slab of a segment. Slots are counted from the start of
    the segment's table. `base` is the slab's first slot, and slot `base + i` begins at byte
    `offset + i * slot_bytes` of the segment."""

    segment: SegmentId
    base: int
    offset: int
    slot_bytes: int


class Pinned(Reply, frozen=True, tag="pinned"):
    """Where the leading chunks are, in order and without gaps; at most `MAX_RUNS` runs, ask again
    for the rest. `epoch`: of the keys' namespace."""

    runs: list[SlotRun]
    epoch: int = 0


class Joined(Reply, frozen=True, tag="joined"):
    """An instance, with fds: its generation table, a pidfd of its scheduler, and a pidfd of each
    rank's process, in the order of ranks."""

    blocks: int
    ranks: int


class Cache(Reply, frozen=True, tag="cache"):
    """One worker's KV cache, with its fd."""

    shape: CacheShape


class ResidentRun(PackedRun, frozen=True):
    """Consecutive blocks in the KV cache of `instance`, with their generations at publication. In
    an answer blocks are counted from the question's first hash in block table `table`, in a load
    through all of the load's blocks (`table` is then 0)."""

    table: int
    instance: bytes


class Coming(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Another connection has promised the `chunks` chunks after the found chunks. `begun`: a step
    of the owner has confirmed the promise, or a promised chunk has arrived. `quiet`: seconds since
    the promise was made or confirmed, or since its last chunk arrived. `chunk_seconds`: see
    `Promise`."""

    chunks: int
    begun: bool
    quiet: float
    chunk_seconds: float


COPY = struct.Struct("<IQIIQ")
"""One chunk of `Copies`: the last block of the asker's own copy, which leaves first, that block's
generation, and the first block; the last block of the other copy, and that block's generation. All
as published."""


class Copies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Chunks of the asker of which `instance` has copies, too. `packed`: a `COPY` for each."""

    instance: InstanceId
    packed: bytes

    def __post_init__(self) -> None:
        if len(self.packed) % COPY.size:
            raise ValueError(f"copies: {len(self.packed)} B are not whole copies")


class Segments(Reply, frozen=True, tag="segments"):
    """All segments. `epoch`: of the namespace in the client's hello; 0 without one. `copies`: for
    the connection with which an instance's scheduler joined, chunks that another instance holds as
    well, each told once."""

    segments: list[SegmentInfo]
    epoch: int = 0
    copies: list[Copies] = []


class Found(Reply, frozen=True, tag="found"):
    """What can be read of a prompt. Counted in hashes of the question.

    `found`: how many leading hashes have their blocks of all `full` tables in instances, or their
    chunk in the pool; without such tables, what `end` or the pool has. `end`: where the longest hit
    ends, at most at `found` and the question's `limit`, and at a common end of all tables' blocks:
    what all other tables need for it is in one instance. `pooled`: for each leading whole chunk of
    `found`, whether it is in the pool (a byte, 0 or 1). `residents`: the blocks to read for this
    hit, ordered by table and first block; at most `MAX_REPLICAS` runs have the same block. Their
    generations were unchanged. `epoch`: of the namespace. `cut`: the answer is full; ask again for
    the hashes after `found`, a multiple of the question's `each`. Only with one table. `coming`:
    None if no other instance has promised the next chunk. `copies`: as in `Segments`, if the
    asker is the instance's scheduler."""

    found: Annotated[int, msgspec.Meta(ge=0)]
    end: Annotated[int, msgspec.Meta(ge=0)]
    pooled: bytes = b""
    residents: list[ResidentRun] = []
    epoch: int = 0
    cut: bool = False
    coming: Coming | None = None
    copies: list[Copies] = []


class Count(Reply, frozen=True, tag="count"):
    count: int


class Promised(Reply, frozen=True, tag="promised"):
    """`chunks`: how many chunks are promised now. `epoch`: of their namespace."""

    chunks: int
    epoch: int = 0


class Present(Reply, frozen=True, tag="present"):
    """`epoch`: of the keys' namespace."""

    present: list[bool]
    epoch: int = 0


class Latency(msgspec.Struct, frozen=True, array_like=True):
    """The time of one kind of request inside the server, in microseconds. `total_us`: the sum."""

    count: int
    p50_us: float
    p99_us: float
    total_us: float = 0.0


class ServerStats(Reply, frozen=True, tag="server_stats"):
    """Counters since the server's start, after which `run_id` is another. `lookup_*`: chunks asked
    for and found. `latency`: by request name. `reports`: the newest reports, oldest first.

    `quarantined_slots`: slots in quarantine, by the pid of their writer. `hits`: by namespace,
    prompt tokens that instances report as looked up and as found, in the pool, in KV caches or
    below. Each token counts once for each request. `minute`: the loads and loaded tokens of the
    last minute (`ListSegments`)."""

    run_id: int
    uptime_seconds: float
    clients: int
    chunks: int
    reservations: int
    quarantined_slots: dict[int, int]
    counters: dict[str, int]
    latency: dict[str, Latency]
    segments: list[SegmentInfo]
    namespaces: dict[str, str]
    rss_bytes: int
    reports: list[Reported] = []
    mismatches: list[Mismatch] = []
    instances: list[InstanceStats] = []
    reads: list[ReadStats] = []
    hits: dict[str, tuple[int, int]] = {}
    minute: tuple[int, int] = (0, 0)


OfChunks = Find | Publish | Promise | Reserve | Commit | Abort | Pin | Contains | Remove | Clear
_OfSegments = AddSegment | Lend | OpenSegment | DropSegment | ListSegments
_OfInstances = Join | ShowCache | OpenInstance | OpenCache
OfOthers = Hello | _OfSegments | _OfInstances | Stats | Report
AnyRequest = OfChunks | OfOthers
