"""The protocol: every message that crosses the socket, and nothing else.

A message is one packet of a Unix socket (SOCK_SEQPACKET): a MessagePack array whose first element
is the message's name, `["lookup", [key, ...], ranks]`. The server answers a connection's requests
in their order, each with the reply type that its docstring names after the arrow, or with `Error`.
Fds travel as SCM_RIGHTS with their message, `MAX_FDS` at most. A message that should bring fds and
brings another number of them is refused, and all of them are closed."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Literal, NewType

import msgspec

PROTOCOL_VERSION = 9
MAX_MESSAGE_BYTES = 200_000
"""Linux sends a packet of this size with a socket's ordinary buffer. A client that sends a larger
one is disconnected.
"""
MAX_KEYS = 2048
"""The most keys in one request. The server refuses a request with more, and the connection stays
usable.
"""
MAX_LOOKED_UP = 16_384
"""The most keys times ranks of one look-up; more are refused in the same way."""
MAX_SLOTS = 1024
"""The most slots that one request reserves; the keys beyond are refused as FULL."""
MAX_FDS = 253
"""The most fds of one message: more than that Linux does not send."""
INSTANCE_BYTES = 16
MAX_REGIONS = MAX_FDS
"""The most allocations in which one worker's KV cache lies."""
MAX_PLANES = 1024
"""The most planes of one worker's KV cache. A plane is one part of one layer."""
MAX_PUBLISHED = 512
"""The most chunks of one publication; fewer if their blocks fill a message sooner."""
MAX_OWNERS = 64
"""The most rows of one `ShowReads`."""
MAX_REPLICAS = 2
"""The most resident copies of one chunk in an answer."""
MAX_BLOCKS = 1 << 21
"""The most blocks of an instance."""
MAX_EACH = 1024
"""The most blocks of a resident chunk."""
MAX_RANKS = 64
"""The most workers of an instance."""
NUMBER_BYTES = 4
GENERATION_BYTES = 8
"""Bytes of a block's number and of its generation in messages that pack many of them,
little-endian.
"""

ChunkKey = NewType("ChunkKey", bytes)
"""Namespace (8 bytes), prefix-chained token hash (16), rank (2, big-endian). See
`vcache_backend.transfer.keys`.
"""
SegmentId = NewType("SegmentId", str)
InstanceId = NewType("InstanceId", bytes)
"""Names one start of one EngineCore: 16 random bytes."""
SCHEDULER = -1
"""Stands for an instance's scheduler where others have a rank."""
Named = Annotated[InstanceId, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Medium = Literal["cuda", "host"]
SegmentState = Literal["live", "absent", "draining"]
KEY_BYTES = 26
NAMESPACE_BYTES = 8
RANK_BYTES = 2
_Key = Annotated[ChunkKey, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS)]
SEGMENT_ID = r"\A[0-9A-Za-z_.:-]{1,64}\Z"
MAX_SEGMENT_BYTES = 1 << 46
"""Larger than any allocation there is. More is refused before it reaches a system call."""
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]
_INVISIBLE = (
    r"\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890-\u0891\u08e2\u180e\u200b-\u200f"
    r"\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f"
)
"""Control and format characters, such as those that turn the direction of writing, and separators
of lines: Unicode's Cc, Cf, Zl, Zp.
"""
_PRINTABLE = rf"\A[^{_INVISIBLE}]*\Z"
Text = Annotated[str, msgspec.Meta(max_length=256, pattern=_PRINTABLE)]
MAX_FIELDS = 64
"""The most fields of a layout."""
Field = Annotated[str, msgspec.Meta(max_length=64, pattern=_PRINTABLE)]
TOKEN_BITS = 63
MAX_REPORT_CHARS = 1024
MAX_TOKENS = 1 << 48
"""The most tokens that one message says were looked up. More is no instance."""
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
GRACE_SECONDS = 0.25
"""How long a lease holds in any case after it was granted or renewed, unless it was given for less:
even if its holder's connection is lost, or the server dies and starts again. A copy that ends
within it needs no further proof."""
Level = Literal["info", "warn", "error"]


def of_rank(keys: Sequence[ChunkKey], rank: int) -> list[ChunkKey]:
    """The keys of this rank's part of the same chunks. keys: all of one rank."""
    suffix = rank.to_bytes(RANK_BYTES, "big")
    if keys and keys[0].endswith(suffix):
        return list(keys)
    return [ChunkKey(key[:-RANK_BYTES] + suffix) for key in keys]


def of_ranks(keys: Sequence[ChunkKey], ranks: int) -> list[ChunkKey]:
    """The keys of all parts of the same chunks, chunk by chunk. keys: of rank 0."""
    if ranks == 1:
        return list(keys)
    suffixes = [rank.to_bytes(RANK_BYTES, "big") for rank in range(ranks)]
    return [ChunkKey(key[:-RANK_BYTES] + suffix) for key in keys for suffix in suffixes]


class Refusal(IntEnum):
    """Why a key got no slot. The first two are no failures: the chunk is stored, or being
    stored.
    """

    EXISTS = 0
    BUSY = 1
    FULL = 2
    TOO_LARGE = 3
    NO_SEGMENT = 4


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one chunk lies: `length` bytes at byte `offset` of `segment`. `generation` changes
    whenever the slot is reused.
    """

    segment: SegmentId
    offset: int
    length: int
    generation: int


class SegmentInfo(msgspec.Struct, frozen=True, array_like=True):
    """One segment as the server knows it. `device`: a GPU UUID, `host` or `host:NAME`. Sizes in
    bytes."""

    id: SegmentId
    device: str
    medium: Medium
    nbytes: int
    used: int = 0
    chunks: int = 0
    leased: int = 0
    reserved: int = 0
    largest_hole: int = 0
    evictions: int = 0
    state: SegmentState = "live"


class Reported(msgspec.Struct, frozen=True, array_like=True):
    """A `Report` as the server keeps it. `time`: seconds since the Unix epoch. `pid`: 0 if the
    client is in another pid namespace. `device`: from the connection's hello."""

    time: float
    level: Level
    pid: int
    device: str
    text: str


class Mismatch(msgspec.Struct, frozen=True, array_like=True):
    """A field in which connected instances of one model differ, so that they do not share.
    `values`: each value and the instances that have it. `advice`: what to do, where the field's
    name does not say so."""

    model: str
    field: str
    values: list[tuple[str, list[str]]]
    advice: str


class CacheShape(msgspec.Struct, frozen=True, array_like=True):
    """What a reader must know of one worker's paged KV cache. Sizes in bytes.

    `layout`: the order of bytes in a page; only caches with the same one read each other.
    `num_blocks`, `block_size` (tokens): of the tensors. `stride`: from block to block, the same in
    all planes. `planes`: for each layer and part, layer-major, the region it lies in and where in
    it block 0 begins. `regions`: how much of each region's fd may be mapped."""

    device: Text
    medium: Medium
    layout: Text
    page_bytes: Bytes
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLANES)]
    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_PLANES)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    stride: Bytes
    planes: Annotated[
        list[
            tuple[
                Annotated[int, msgspec.Meta(ge=0, lt=MAX_REGIONS)],
                Annotated[int, msgspec.Meta(ge=0, le=1 << 48)],
            ]
        ],
        msgspec.Meta(max_length=MAX_PLANES),
    ]
    regions: Annotated[list[Bytes], msgspec.Meta(min_length=1, max_length=MAX_REGIONS)]

    def misfit(self) -> str:
        """Why no cache can have this shape; empty if every page lies inside its region."""
        if len(self.planes) != self.layers * self.parts:
            return f"{len(self.planes)} planes of {self.layers} layers with {self.parts} parts"
        if self.num_blocks > 1 and self.stride < self.page_bytes:
            return f"pages of {self.page_bytes:,} B every {self.stride:,} B"
        span = (self.num_blocks - 1) * self.stride + self.page_bytes
        for plane, (region, offset) in enumerate(self.planes):
            if not 0 <= region < len(self.regions):
                return f"plane {plane} lies in region {region} of {len(self.regions)}"
            nbytes, end = self.regions[region], offset + span
            if offset < 0 or end > nbytes:
                return f"plane {plane} lies at bytes {offset:,} to {end:,} of region {region}, which has {nbytes:,} B"
        return ""


class InstanceStats(msgspec.Struct, frozen=True, array_like=True):
    """One instance as the server knows it. `id`: in hex; empty if it shares through the pool only.
    `device`: of its first worker. `pid`: of its scheduler, 0 if absent or not visible.

    `resident`: chunks that others find in it, once `missing` is empty. `regions`: fds of its
    workers' KV caches. `missing`: the first part that is not shown; while there is one, nothing is
    found in the instance. `name`: from its hello. `namespace`: in hex. `silent`: seconds since the
    server last heard of one of its processes. `stopped`: the pid of a process of it that is
    stopped; 0 if none is."""

    id: str
    device: str
    pid: int
    blocks: int
    resident: int
    regions: int
    ranks: int = 1
    missing: str = ""
    name: str = ""
    namespace: str = ""
    silent: float = 0.0
    stopped: int = 0


class StillMapped(msgspec.Struct, frozen=True, array_like=True):
    """A process that has not said that it unmapped the KV cache of `instance` (in hex), which has
    ended: that memory of `device` is not free. `pid`: 0 if it is not visible. `stopped`: whether it
    is stopped, and so cannot say so."""

    instance: str
    device: str
    pid: int
    stopped: bool


class Reads(msgspec.Struct, frozen=True, array_like=True):
    """What one client has read out of the KV cache of `instance` since it started: bytes that
    counted, and chunks that the verdict refused because their owner had reused the blocks."""

    instance: Named
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    refused: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class ReadStats(msgspec.Struct, frozen=True, array_like=True):
    """The `Reads` of a connected client: process `pid`, 0 if it is not visible, with its device.
    `instance`: in hex. `reader`: the instance that the client is part of, in hex; empty if it shows
    none."""

    pid: int
    device: str
    instance: str
    nbytes: int
    refused: int
    reader: str = ""


# ---- requests


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all requests. `tag` is the name on the wire."""


class Hello(Request, frozen=True, tag="hello"):
    """The first message of a connection → `Welcome`, or `Error` and the connection closes.

    Fds, either of which may be missing: a pidfd of the client, and the ledger of the server that
    it was connected to before. `layout`: the instance's layout as text, field by field (see
    `transfer.layout.Layout`); empty for tools. `token`: a number that the client keeps, by which
    the server recognises it where it cannot see its pid. `name`: what people know the instance by,
    such as its port, `:8000`."""

    version: int
    device: Text
    medium: Medium
    layout: Annotated[dict[Field, str], msgspec.Meta(max_length=MAX_FIELDS)] = {}
    token: Annotated[int, msgspec.Meta(ge=0, le=(1 << TOKEN_BITS) - 1)] = 0
    name: Text = ""


class AddSegment(Request, frozen=True, tag="add_segment"):
    """Register a segment, whose fd comes along → `Added`.

    `claim`: of the `Lendable` under which it was made; refused if that has ended. 0: add it
    unconditionally. `again`: it was offered before on an earlier connection, and is taken only if
    the server knows what lies in it."""

    id: Annotated[SegmentId, msgspec.Meta(pattern=SEGMENT_ID)]
    device: Text
    medium: Medium
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENT_BYTES)]
    claim: int = 0
    again: bool = False


class Lend(Request, frozen=True, tag="lend"):
    """How much of its device's memory may this client allocate now, if the pool is to have `nbytes`
    there in all? → `Lendable`.
    """

    nbytes: Bytes


class OpenSegment(Request, frozen=True, tag="open_segment"):
    """→ `Opened`, with the segment's fd."""

    id: SegmentId


class Unusable(Request, frozen=True, tag="unusable"):
    """This client cannot map a segment: give its reservations no slot there → `Count` of segments
    it avoids.
    """

    id: Annotated[SegmentId, msgspec.Meta(max_length=64)]


class DropSegment(Request, frozen=True, tag="drop_segment"):
    """Forget a segment's chunks; it is gone once its last lease and reservation end → `Dropped`."""

    id: SegmentId


class ListSegments(Request, frozen=True, tag="list_segments"):
    """→ `Segments`. `asked`, `found`: prompt tokens that this client's instance has looked up since
    the last such message, and those that it found, each once."""

    asked: Tokens = 0
    found: Tokens = 0


class Reserve(Request, frozen=True, tag="reserve"):
    """Ask for a slot of `nbytes` for each key, in prefix order → `Reserved`. On the client's
    device, else on peers, else by eviction.
    """

    keys: Keys
    nbytes: Bytes


class Commit(Request, frozen=True, tag="commit"):
    """The copies of this reservation are complete: publish them → `Count` of chunks now visible (0:
    it was void).

    `prefix`: the chunks before these, stored already. They become more recent than these, so that
    the end of a prefix is evicted first."""

    reservation: int
    prefix: Keys = []


class Abort(Request, frozen=True, tag="abort"):
    """No copy of this reservation runs or will run: free its slots → `Count` of slots freed."""

    reservation: int


class Lookup(Request, frozen=True, tag="lookup"):
    """How many leading chunks do all `ranks` ranks have (keys of rank 0)? Without a lease →
    `Count`.
    """

    keys: Keys
    ranks: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1


class Acquire(Request, frozen=True, tag="acquire"):
    """Lease the leading run of chunks that are there → `Leased`."""

    keys: Keys


class Renew(Request, frozen=True, tag="renew"):
    """Extend a lease that has not ended to its full time → `Verdict` (False: it had ended, acquire
    again).
    """

    lease: int


class Release(Request, frozen=True, tag="release"):
    """End a lease → `Verdict`: did it hold until now? If False, whatever was read under it is
    void.
    """

    lease: int


class Contains(Request, frozen=True, tag="contains"):
    """→ `Present`, one answer a key; no lease, no effect on recency. `where`: say in which segment,
    too.
    """

    keys: Keys
    where: bool = False


class Touch(Request, frozen=True, tag="touch"):
    """Make chunks recent (keys in prefix order; the first ends up the most recent) → `Count` of
    those in the pool.
    """

    keys: Keys


class Remove(Request, frozen=True, tag="remove"):
    """Forget chunks; the slot of a leased one is freed when its leases end → `Count` removed.
    Without `force` leased chunks stay.
    """

    keys: Keys
    force: bool = True


class Clear(Request, frozen=True, tag="clear"):
    """Forget every chunk of one namespace (8 bytes), or of all with b"", those being written
    included → `Count` of those that were visible.

    `reset`: the weights have changed, or may have: raise the epoch, too, so that nothing offloaded
    before is found again."""

    namespace: Annotated[bytes, msgspec.Meta(max_length=NAMESPACE_BYTES)] = b""
    reset: bool = False


class Join(Request, frozen=True, tag="join"):
    """An instance's scheduler shows its generation table, whose fd comes along → `Count` (1).

    `blocks`: how many vLLM has, the length of the table. `each`: blocks of a chunk.
    Refused while another process is its scheduler."""

    instance: Named
    namespace: Annotated[
        bytes, msgspec.Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)
    ]
    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCKS)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    each: Annotated[int, msgspec.Meta(ge=1, le=MAX_EACH)]


class ShowCache(Request, frozen=True, tag="show_cache"):
    """A worker of an instance shows its KV cache, before or after its scheduler joined → `Count` of
    regions. The fd of each region comes along, in the order of `shape.regions`.

    Refused while another process is this rank. What this rank showed before is void.
    """

    instance: Named
    rank: Rank
    shape: CacheShape


class OpenInstance(Request, frozen=True, tag="open_instance"):
    """→ `Joined`. Refused, like all `Open…` below, unless all of the instance is shown."""

    instance: Named


class OpenCache(Request, frozen=True, tag="open_cache"):
    """→ `Cache`."""

    instance: Named
    rank: Rank


class CloseInstance(Request, frozen=True, tag="close_instance"):
    """This connection's process no longer maps any region of the instance → `Count` (1, or 0 if it
    had opened none).
    """

    instance: Named


class Publish(Request, frozen=True, tag="publish"):
    """The step that wrote these chunks is over, and they can be read where they lie → `Count` of
    chunks taken.

    0: the instance has not joined, or `sequence` or `epoch` is old. Only on the connection that
    showed this rank's cache. `keys`: of one rank. `blocks`, `generations`: uint32 and uint64,
    little-endian, `each` of them a key. `epoch`: the one in which all of it was computed, as far as
    the scheduler had heard.

    A chunk replaces what the instance published under its key, or with one of its blocks, with no
    higher `sequence`. With several ranks it is found once all have published the same. It is not
    taken if it names a block twice."""

    instance: Named
    sequence: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    keys: Annotated[list[_Key], msgspec.Meta(max_length=MAX_PUBLISHED)]
    blocks: bytes
    generations: bytes
    epoch: int = 0


class Retract(Request, frozen=True, tag="retract"):
    """Void what the instance published, or will publish, with a lower sequence → `Count` of chunks
    dropped. From any of its parts.
    """

    instance: Named
    sequence: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Hint(Request, frozen=True, tag="hint"):
    """A load reads chunks in `instance`. keys: the prefix up to the last of them, of rank 0 →
    `Count` of those that others find there. Its scheduler hears of it, and keeps them as if they
    had been used there."""

    instance: Named
    keys: Keys


class Listen(Request, frozen=True, tag="listen"):
    """What is new for an instance's scheduler, on the connection with which it joined? →
    `Heard`.
    """

    instance: Named


class ShowReads(Request, frozen=True, tag="show_reads"):
    """What this client has read out of others' KV caches so far, for the statistics → `Count` of
    the rows. `instance`: that it is part of; b"" if it is part of none."""

    reads: Annotated[list[Reads], msgspec.Meta(max_length=MAX_OWNERS)]
    instance: Annotated[InstanceId, msgspec.Meta(max_length=INSTANCE_BYTES)] = InstanceId(b"")


class Find(Request, frozen=True, tag="find"):
    """Which leading chunks are in the pool, for all `ranks` ranks, or resident in an instance (keys
    of rank 0)? → `Found`.

    `instance`: the asker, whose own chunks are left out; b"" if it is none.
    """

    keys: Keys
    ranks: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    instance: Annotated[InstanceId, msgspec.Meta(max_length=INSTANCE_BYTES)] = InstanceId(b"")


class Stats(Request, frozen=True, tag="stats"):
    """→ `ServerStats`."""


class Report(Request, frozen=True, tag="report"):
    """A line for the node's operator, such as why an instance caches nothing → `Count`: 1, or 0 if
    this connection's text is kept already. The server logs it and keeps the newest ones."""

    level: Level
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REPORT_CHARS)]


# ---- replies


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all replies."""


class Welcome(Reply, frozen=True, tag="welcome"):
    """`epoch`: another one at every start of the server, whose ledger comes along as an fd (see
    `ledger.Ledger`). `mismatches`: for each other namespace of the model, a line that says why
    the client cannot share with it."""

    version: int
    epoch: int
    lease_seconds: float
    reservation_seconds: float
    mismatches: list[str]


class Error(Reply, frozen=True, tag="error"):
    """The request was refused. `fatal`: the server closes the connection."""

    message: str
    fatal: bool = False


class Added(Reply, frozen=True, tag="added"):
    """`chunks`: how many chunks from an earlier life of the server the segment brings back.
    `taken`: False if it was offered again and its memory cannot be used any more, since the server
    does not know it and an earlier writer may still write there. Lend a fresh one."""

    chunks: int
    taken: bool = True


class Lendable(Reply, frozen=True, tag="lendable"):
    """`nbytes`: to be allocated and added as one segment, within `CLAIM_SECONDS`, on this
    connection. 0: the pool has them, others are about to allocate them, or they may be offered
    again after a restart; ask again later."""

    claim: int
    nbytes: int


class Opened(Reply, frozen=True, tag="opened"):
    """A segment. Its fd comes along."""

    segment: SegmentInfo


class Dropped(Reply, frozen=True, tag="dropped"):
    """`gone`: False while its chunks are being forgotten, or leases or reservations still hold
    it.
    """

    chunks: int
    gone: bool


class Segments(Reply, frozen=True, tag="segments"):
    segments: list[SegmentInfo]


class Reserved(Reply, frozen=True, tag="reserved"):
    """A location or a `Refusal` for each key. `reservation`: 0 if nothing was reserved. `seconds`:
    how long it may stay uncommitted. `reason`: explains a FULL, TOO_LARGE or NO_SEGMENT. `epoch`:
    of the keys' namespace."""

    reservation: int
    seconds: float
    slots: list[Location | int]
    reason: str = ""
    epoch: int = 0


class Leased(Reply, frozen=True, tag="leased"):
    """Locations of the leading keys that are there. `lease`: 0 if there are none. `seconds`: how
    long it holds from the grant; clients count from when they sent the request. `epoch`: of the
    keys' namespace."""

    lease: int
    seconds: float
    locations: list[Location]
    epoch: int = 0


class Joined(Reply, frozen=True, tag="joined"):
    """An instance. Fds that come along: its generation table, a pidfd of its scheduler, and a pidfd
    of each rank's process, in the order of ranks."""

    blocks: int
    ranks: int
    each: int


class Cache(Reply, frozen=True, tag="cache"):
    """One worker's KV cache. The fd of each region comes along, in the order of `shape.regions`."""

    shape: CacheShape


class Resident(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A chunk in an instance's KV cache. `instance`: its index in `Found.instances`. `blocks`,
    `generations`: as published.
    """

    instance: int
    blocks: bytes
    generations: bytes


class Found(Reply, frozen=True, tag="found"):
    """For each leading chunk that is somewhere, whether it is in the pool (a byte, 0 or 1), and
    where it is resident: at most `MAX_REPLICAS` places, first the instance that has the chunk
    before, too. `epoch`: of the keys' namespace. `cut`: the answer has reached its bound; ask again
    for the keys beyond."""

    pooled: bytes
    instances: list[InstanceId]
    residents: list[list[Resident]]
    epoch: int = 0
    cut: bool = False


class Heard(Reply, frozen=True, tag="heard"):
    """`epoch`: of the instance's namespace. `blocks`, `generations`: of whole chunks, as published,
    that others have read there since the last `Listen`; the one that should stay longest comes
    last."""

    epoch: int
    blocks: bytes = b""
    generations: bytes = b""


class Count(Reply, frozen=True, tag="count"):
    count: int


class Verdict(Reply, frozen=True, tag="verdict"):
    held: bool


class Present(Reply, frozen=True, tag="present"):
    """`epoch`: of the keys' namespace. `segments`: one a key, if asked for; "" if the chunk is not
    in the pool.
    """

    present: list[bool]
    epoch: int = 0
    segments: list[str] = []


class Latency(msgspec.Struct, frozen=True, array_like=True):
    """The time of one kind of request inside the server, in microseconds. `total_us`: of all of
    them.
    """

    count: int
    p50_us: float
    p99_us: float
    total_us: float = 0.0


class ServerStats(Reply, frozen=True, tag="server_stats"):
    """Counters since the server's start. `lookup_*`: chunks asked for and found. `latency`: by
    request name. `reports`: the newest, oldest first.

    `quarantined_slots`: slots that wait until their writer, by its pid, ends or answers for them.
    `hits`: by namespace, prompt tokens that instances looked up, as they say, and those found: each
    token once a request, in the pool, in KV caches and below."""

    epoch: int
    uptime_seconds: float
    clients: int
    chunks: int
    leases: int
    reservations: int
    quarantined: int
    counters: dict[str, int]
    latency: dict[str, Latency]
    segments: list[SegmentInfo]
    namespaces: dict[str, str]
    rss_bytes: int
    reports: list[Reported] = []
    quarantined_slots: dict[int, int] = {}
    mismatches: list[Mismatch] = []
    instances: list[InstanceStats] = []
    still_mapped: list[StillMapped] = []
    reads: list[ReadStats] = []
    hits: dict[str, tuple[int, int]] = {}


_OfSegments = AddSegment | Lend | OpenSegment | Unusable | DropSegment | ListSegments
_OfChunks = (
    Reserve
    | Commit
    | Abort
    | Lookup
    | Acquire
    | Renew
    | Release
    | Contains
    | Touch
    | Remove
    | Clear
)
OfInstances = Join | ShowCache | OpenInstance | OpenCache | CloseInstance
OfResidents = Publish | Retract | Hint | Listen | Find | ShowReads
OfOthers = Hello | _OfSegments | OfInstances | OfResidents | Stats | Report
AnyRequest = _OfChunks | OfOthers
_OfOneThing = Count | Verdict | Present | Added | Lendable | Opened | Dropped
AnyReply = (
    Welcome
    | Error
    | _OfOneThing
    | Segments
    | Reserved
    | Leased
    | Joined
    | Cache
    | Heard
    | Found
    | ServerStats
)
