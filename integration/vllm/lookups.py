"""Finds a request's chunks in the pool, in other instances' KV caches and in the offload tier.

`send` asks the server when a request arrives, while the scheduler does other work. `find` reads the
answer, or asks again if the answer is missing or too old. See `waits` for what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic
from typing import Any

from msgspec.structs import replace

from vcache_backend.errors import ServerTimeout, ServerUnavailable, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import (
    HASH_BYTES,
    QUEUED_SECONDS,
    BlockTable,
    ChunkKey,
    Find,
    Found,
    InstanceId,
    ResidentRun,
    chunk_keys,
    of_ranks,
)
from vcache_backend.resident.mappings import Tables
from vcache_backend.transfer.keys import adapter_digest, block_hashes, state_keys, tail_hash

from .adapters import Adapters
from .instance import InstanceContext
from .metadata import Chunks
from .requests import FAILED, LATE, PROMISED_SECONDS, Answer, Question, Tracked
from .telemetry.stats import Meter

log = logging.getLogger("vllm.vcache")

LATE_SECONDS = 0.001
"""How long vLLM's scheduler waits for an answer in one step. A later answer is read in a later
step."""
YOUNG_SECONDS = 0.02
"""How long an answer's blocks are taken as unchanged. The load compares all generations anyway."""


class Lookups:
    """Looks chunks up. Runs in the scheduler's thread.

    `send` and `find` wait up to `LATE_SECONDS` to send the question, and `find` as long again for
    the answer; twice, if the first answer names the promise of a queued request. `find` waits for
    whole server calls if the hashes or the answer exceed one message, if a pool keeps states, and
    if vLLM read the answer too late; and for one look-up in the offload tier."""

    def __init__(self, context: InstanceContext, meter: Meter) -> None:
        self._context, self._meter = context, meter
        self._adapters = Adapters()
        self._late = False
        """Whether the last answer that vLLM asked for was late."""

    def identifies(self, adapter: object) -> bool:
        """Whether the requests of a LoRA adapter may be cached: its files are identified."""
        return bool(self._adapters.content(adapter))

    def forget(self, tracked: Tracked) -> None:
        """Drop the request's question and answer."""
        tracked.lookup.question = tracked.lookup.answer = tracked.lookup.late_since = None

    def rename(self, tracked: Tracked) -> None:
        """Drop the request's keys, too, since the version of the weights is in every key."""
        self.forget(tracked)
        tracked.lookup.named, tracked.lookup.computed_with = b"", None
        tracked.lookup.probe = None

    def name(self, tracked: Tracked, seen: dict[tuple[Any, ...], str] | None = None) -> bool:
        """Name the request's blocks: `hashes` and `keys` can be called. False if the adapter cannot
        be identified, or is another one than when the blocks were first named.

        seen: the contents of the adapters at which the caller has looked in this step."""
        lookup, adapter = tracked.lookup, tracked.request.lora_request
        if adapter is None:
            lookup.computed_with = lookup.computed_with or (self._context.version,)
        else:
            known = self._computed_with(adapter, {} if seen is None else seen)
            if known is None or lookup.computed_with not in (None, known):
                return False
            lookup.computed_with = known
        unit, own = self._context.unit, tracked.request.block_hashes
        named = len(lookup.named) // HASH_BYTES * unit
        if named and own[named - 1 : named] != [lookup.last]:
            # A session goes on with other tokens behind its last turn.
            self.forget(tracked)
            named, lookup.probe = 0, None
        if not named:
            own = own[unit - 1 :: unit] if unit > 1 else own
            lookup.named = block_hashes(own, *lookup.computed_with)
            lookup.last = own[-1] if own else b""
        return True

    def _computed_with(
        self, adapter: Any, seen: dict[tuple[Any, ...], str]
    ) -> tuple[bytes, ...] | None:
        """What KV of an adapter's depends on besides its tokens; None if the adapter cannot be
        identified."""
        known_as = adapter.lora_int_id, adapter.lora_name, adapter.lora_path
        if known_as not in seen:
            seen[known_as] = self._adapters.content(adapter)
        if not seen[known_as]:
            return None
        return self._context.version, adapter_digest(adapter, seen[known_as])

    def hashes(self, tracked: Tracked, first: int, stop: int, scale: int) -> bytes:
        """The hashes of the request's blocks [first, stop), each of `scale` of vLLM's hashes, for
        other instances. `name` must have returned True."""
        named = tracked.lookup.named
        if scale == self._context.unit and stop * HASH_BYTES <= len(named):
            return named[first * HASH_BYTES : stop * HASH_BYTES]
        own = tracked.request.block_hashes[scale - 1 + first * scale : stop * scale : scale]
        return block_hashes(own, *tracked.lookup.computed_with or ())

    def tail(self, tracked: Tracked, tokens: int) -> tuple[int, bytes]:
        """The number of the block behind the whole ones of the request's first `tokens` tokens, and
        the name of what they have there without the last one; empty if they have nothing there, or
        no name. `name` must have returned True."""
        request, block = tracked.request, self._context.hash_block
        whole = tokens // block
        if whole * block >= tokens - 1 or not self._context.has_tail(request):
            return whole, b""
        behind = request.all_token_ids[whole * block : tokens - 1]
        made = tail_hash(request.block_hashes[whole - 1], behind)
        return whole, block_hashes([made], *tracked.lookup.computed_with or ())

    def keys(self, tracked: Tracked, first: int, stop: int) -> list[ChunkKey]:
        """The keys (of rank 0) of the request's chunks [first, stop). `name` must have returned
        True."""
        context, each = self._context, self._context.names
        hashes = self.hashes(tracked, first * each, stop * each, context.unit)
        return chunk_keys(context.prefix, hashes, each)

    def chunks(self, tracked: Tracked, first: int, stop: int, parts: int = 0) -> Chunks:
        """The same for a worker, with the state's `parts` behind them."""
        context, each = self._context, self._context.names
        hashes = self.hashes(tracked, 0, stop * each, context.unit)
        return Chunks(context.prefix, hashes, each, first, parts)

    def send(self, tracked: Tracked, first: int) -> None:
        """Ask the server for the chunks from number `first` on, and return. `name` must have made
        the keys; `find` reads the answer."""
        client = self._context.client
        if client is not None and tracked.lookup.question is None:
            try:
                self._send(client, tracked, first, begins=False)
            except VCacheError as error:
                log.debug("look-up: %s", error)

    def ask_again(self, tracked: Tracked, first: int) -> bool:
        """Like `send`, in place of earlier answers. False if nobody can be asked."""
        self.forget(tracked)
        self.send(tracked, first)
        return tracked.lookup.question is not None

    def probe(self, tracked: Tracked, chunk: int) -> bool:
        """Like `ask_again`, for chunk number `chunk` alone, in a small message that promises
        nothing. `probed` reads the answer. With several block tables the same as `ask_again`."""
        client = self._context.client
        if client is None or self._context.by_ends:
            return self.ask_again(tracked, chunk)
        self.forget(tracked)
        at, lookup = monotonic(), tracked.lookup
        if lookup.probe is None or lookup.probe[0] != chunk:
            find = replace(self._request(tracked, chunk, begins=False), promise=0)
            lookup.probe = chunk, find
        try:
            sent = client.send_find(lookup.probe[1], _patience(client))
        except VCacheError as error:
            log.debug("look-up: %s", error)
            return False
        if sent is None:
            return self.ask_again(tracked, chunk)
        lookup.question = Question(sent, chunk, at, monotonic() - at, False, lookup.most, True)
        return True

    def probed(self, tracked: Tracked) -> Answer | None:
        """Read the answer to a probe: its chunk is there if `hits` counts it. `LATE`: not yet;
        `FAILED`: there will be none. None: the present question is no probe."""
        question = tracked.lookup.question
        if question is None or not question.probes:
            return None
        try:
            # Mostly it has come. After a late answer the next ones are probably late, too.
            self._late = not question.sent.arrives(0.0 if self._late else LATE_SECONDS)
            if self._late:
                return LATE
            reply = question.sent.answer(0.0)
        except VCacheError as error:
            log.debug("look-up: %s", error)
            reply = None
        tracked.lookup.question = None
        if reply is None:
            return FAILED
        here, client = question.first + reply.found // self._context.names, self._context.client
        if tracked.load is not None and here == tracked.lookup.chunks and client is not None:
            # An open load goes on from this chunk, and needs no other answer.
            asked = question.first, question.most
            return self._answered(client, tracked, *asked, reply, question.at, question.at)
        return Answer(question.first, here, here, question.at, 0.0, coming=reply.coming)

    def find(self, tracked: Tracked, first: int) -> Answer:
        """Look up the chunks from number `first` on. `name` must have made the keys. After a `LATE`
        answer call again in the next step. `FAILED` if the server does not answer within the
        deadline of a call."""
        lookup, client, now = tracked.lookup, self._context.client, monotonic()
        late_since, question = lookup.late_since, lookup.question
        if question is not None and late_since is None and now > question.at + PROMISED_SECONDS:
            lookup.question = None
        answer = FAILED
        if client is not None:
            over = late_since is not None and now > late_since + client.request_seconds
            try:
                answer = self._answer(client, tracked, first, over)
            except VCacheError as error:
                late = late_since is not None
                answer = self._failed(error, late, counted=lookup.failed)
        self._late = answer is LATE
        if self._late:
            lookup.late_since = late_since or now
            return answer
        lookup.late_since, lookup.failed = None, answer is FAILED
        if not answer.counted:
            self._count(tracked, answer, first)
        return answer

    # ---- inside

    def _count(self, tracked: Tracked, answer: Answer, first: int) -> None:
        """Count one look-up, and each token once, though vLLM asks again while the request waits
        for blocks."""
        answer.counted = True
        lookup, before = tracked.lookup, first * self._context.chunk_size
        hit = max(min(answer.tokens, lookup.most) - before, 0)
        wanted = max(lookup.most - before, 0)
        asked, found = max(wanted - lookup.asked, 0), max(hit - lookup.found, 0)
        lookup.asked = max(lookup.asked, wanted)
        lookup.found = max(lookup.found, hit)
        self._meter.looked_up(asked, found, answer.seconds)
        if self._context.client is not None:
            self._context.client.count(asked=asked, found=found)

    def _answer(self, client: Client, tracked: Tracked, first: int, over: bool) -> Answer:
        """Return the last answer if it counts, otherwise the server's answer to the present
        question, sent now if necessary; `LATE` if late. over: stop waiting. VCacheError."""
        lookup, now = tracked.lookup, monotonic()
        while True:
            question = lookup.question
            if question is None:
                answer = lookup.answer
                if answer is not None and answer.counts(first, tracked.promise.made):
                    return answer
                lookup.answer = None
                try:
                    question = self._send(client, tracked, first, begins=True)
                except ServerTimeout:
                    if over:
                        raise
                    return LATE
                if question is None:
                    return self._ask(client, tracked, first)
                over = False
            # After a late answer the next answers are probably late, too.
            if not question.sent.arrives(0.0 if self._late else _patience(client)) and not over:
                return LATE
            lookup.question = None
            started = monotonic() - question.seconds
            try:
                reply = question.sent.answer(_patience(client) if over else 0.0)
            except ServerUnavailable:
                if over or lookup.late_since is not None or question.at >= now:
                    raise
                # The question was sent ahead, on a connection that is lost.
                continue
            if reply.cut:
                return self._ask(client, tracked, first)
            if reply.coming is not None and tracked.promise.early and _is_queued(question, reply):
                # The other request is still queued, and this one begins.
                continue
            asked = question.first, question.most
            answer = self._answered(client, tracked, *asked, reply, question.at, started)
            if answer.counts(first):
                return answer
            if answer.covers(first):
                # vLLM has not come back for this answer in time, and might come back late again:
                # wait now.
                return self._ask(client, tracked, first)

    def _send(self, client: Client, tracked: Tracked, first: int, begins: bool) -> Question | None:
        """Send a question. None if it does not fit into one message. VCacheError."""
        # Where a hit of several block tables ends depends on the whole prompt.
        at, first = monotonic(), 0 if self._context.by_ends else first
        sent = client.send_find(self._request(tracked, first, begins), _patience(client))
        if sent is None:
            return None
        tracked.promise.made |= tracked.promise.early
        lookup = tracked.lookup
        lookup.question = question = Question(
            sent, first, at, monotonic() - at, begins, lookup.most
        )
        lookup.late_since = None
        return question

    def _ask(self, client: Client, tracked: Tracked, first: int) -> Answer:
        """Ask the server, and wait for the answer. VCacheError."""
        at, first = monotonic(), 0 if self._context.by_ends else first
        most = tracked.lookup.most
        reply = client.find(self._request(tracked, first, begins=True))
        return self._answered(client, tracked, first, most, reply, at, at, fresh=True)

    def _failed(self, error: VCacheError, late: bool = False, counted: bool = False) -> Answer:
        """late: an earlier step has waited for the answer in vain. counted: so was the last
        answer."""
        log.debug("look-up: %s", error)
        if not counted:
            self._meter.count("failures", 1, "late" if late else error.cause)
        return FAILED

    def _request(self, tracked: Tracked, first: int, begins: bool) -> Find:
        context, own = self._context, self._context.publications
        each, begin, lookup = context.names, first * context.names, tracked.lookup
        promise = tracked.promise.number if tracked.promise.early else 0
        stop = lookup.chunks if own is None else len(tracked.request.block_hashes)
        tail = b""
        if context.reads_tails:
            whole, tail = self.tail(tracked, lookup.most + 1)
            stop = whole if tail else stop
        return Find(
            context.prefix,
            self.hashes(tracked, begin, stop, context.unit) + tail,
            each,
            max(0, -(-lookup.most // (context.unit * context.hash_block)) - begin),
            context.ranks,
            own.instance if own is not None else InstanceId(b""),
            own is None,
            promise,
            begins,
        )

    def _answered(
        self,
        client: Client,
        tracked: Tracked,
        first: int,
        most: int,
        reply: Found,
        at: float,
        started: float,
        fresh: bool = False,
    ) -> Answer:
        """Make and keep the `Answer` for the chunks from number `first` on, from the server's reply
        and the offload tier's hits. most: of the prompt's tokens were asked for: the request may
        have more by now, and the last block found holds no others. fresh: the server has just
        answered."""
        context, each = self._context, self._context.names
        end, residents = reply.end, reply.residents
        if context.tables is not None and context.publications is not None and not fresh:
            tables = None if monotonic() < at + YOUNG_SECONDS else context.tables
            end, residents = chosen(reply, each, context.publications.tables, tables)
            if end < reply.end and context.by_ends:
                return self._ask(client, tracked, first)
        # Nothing can be loaded behind a block that has just been lost.
        found = reply.found if end == reply.end else end
        coming = reply.coming if end == reply.end else None
        asked = tracked.lookup.chunks - first
        if tracked.promise.early:
            tracked.promise.made = reply.found // each < asked and reply.coming is None
        chunks = (end if context.by_ends else found) // each
        if context.groups.parts and context.publications is None and chunks:
            chunks = self._with_state(client, self.keys(tracked, first, first + chunks))
        hits, before = chunks, first * context.chunk_size
        if not context.groups.parts and context.offload is not None:
            keys = self.keys(tracked, first, first + asked)
            hits = context.offload.extend(client, keys, context.ranks, chunks)
        tokens = before + hits * context.chunk_size
        if context.publications is not None and hits == chunks:
            block = context.groups.block
            tokens = min(before + end * context.hash_block // block * block, most)
        answer = Answer(first, first + hits, first + chunks, at, monotonic() - started, tokens)
        answer.residents, answer.whole = residents, context.by_ends
        answer.by_chunks = context.publications is None or b"\1" in reply.pooled
        answer.epoch = reply.epoch
        if context.by_ends:
            answer.found = found * context.hash_block
        if coming is not None:
            answer.coming, answer.comes_to = coming, first + reply.found // each + coming.chunks
        tracked.lookup.answer = answer
        return answer

    def _with_state(self, client: Client, keys: list[ChunkKey]) -> int:
        """Shorten a hit to end at a chunk with a state, stored by all ranks. Returns the number of
        chunks left."""
        ranks, parts = self._context.ranks, self._context.groups.parts
        try:
            stored = client.contains(of_ranks(state_keys(keys, parts), ranks))
        except VCacheError as error:
            self._failed(error)
            return 0
        each = parts * ranks
        ends = range(len(stored), 0, -each)
        return next((end // each for end in ends if all(stored[end - each : end])), 0)


def chosen(
    reply: Found, each: int, shapes: Sequence[BlockTable], tables: Tables | None
) -> tuple[int, list[ResidentRun]]:
    """Choose the blocks to read from an answer's copies, whose order is random. Returns how many
    leading hashes can be read, and the runs to read in place. each: hashes of a chunk. shapes: the
    block tables. tables: the generations of other instances; None: no block has changed.

    Takes a chunk that no copy has unchanged from the pool. Of copies that vLLM frees from their end
    on only the last block is checked: the load checks all blocks."""
    end, taken = reply.end, list[ResidentRun]()
    for number, shape in enumerate(shapes):
        runs = [run for run in reply.residents if run.table == number]
        if shape.kind != "full":
            if tables is not None and any(tables.leading(run) < run.count for run in runs):
                return 0, []
            taken += runs
            continue
        at, stop = 0, end // shape.scale
        while at < stop:
            if run := _intact(runs, at, tables):
                taken.append(run)
                at = run.stop
            elif reply.pooled[at // each : at // each + 1] == b"\1":
                at = min(stop, (at // each + 1) * each)
            else:
                break
        end = min(end, at * shape.scale)
    return end, taken


def _intact(runs: Sequence[ResidentRun], at: int, tables: Tables | None) -> ResidentRun | None:
    """The first run with an unchanged block `at`, cut to its unchanged blocks from there on."""
    for run in runs:
        if run.first <= at < (stop := run.stop) and run.fits():
            here = run if at == run.first else run.cut(at, stop)
            if tables is None:
                return here
            whole = tables.leading(run.cut(stop - 1, stop))
            if count := here.count if whole else tables.leading(here):
                return here.cut(at, at + count)
    return None


def _is_queued(question: Question, reply: Found) -> bool:
    """Whether the chunks are promised by a request that is still queued, which gives way to a
    request that begins. The question did not say that its request begins."""
    coming = reply.coming
    if coming is None or coming.begun or question.begins:
        return False
    return coming.quiet + monotonic() - question.at > QUEUED_SECONDS


def _patience(client: Client) -> float:
    return min(LATE_SECONDS, client.request_seconds)
