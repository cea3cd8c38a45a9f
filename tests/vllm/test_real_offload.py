"""Our connector in real vLLM on the CPU with a real Mooncake offload tier: two nodes with a pool
each, and one store.

`a`, on the first node, stores, and computes what answers are compared with. `b`, on the second, has
never computed what it is asked, and its pool has room for 16 chunks only. What the store does wrong
costs a computation: same tokens, and nobody else notices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import vllm_cases
from mooncake_cases import MIB, names_in, needs_mooncake
from mooncake_store import Depot
from processes import eventually
from vllm_cases import (
    BLOCK,
    CHUNK,
    OURS,
    PIN,
    QUICK,
    TOKEN_BYTES,
    Answer,
    Instance,
    Node,
    Prompt,
    meddled,
    new_tokens,
    stopped_at,
)

from vcache_backend.offload.objects import NAME_PREFIX
from vcache_backend.protocol.messages import NAMESPACE_BYTES

CHUNK_BYTES = CHUNK * TOKEN_BYTES
ROOM = 16
"""Chunks that the second node's pool has room for."""
HITS = 4 * CHUNK
BUFFERS = 24
"""For staging, so few that those which get lost are missed."""


class Two:
    """Two nodes, one store, an instance on each."""

    def __init__(self, folder: Path, depot: Depot) -> None:
        self.depot, self.undo = depot, ExitStack()
        self.first, self.second = (Node(folder / name, QUICK) for name in ("1", "2"))
        self.second.model = self.first.model
        for each in (self.first, self.second):
            self.undo.enter_context(each.undo)
            each.serve()
        self.a = self.first.connect("a", self.settings(400))
        self.b = self.second.connect("b", self.settings(ROOM))

    def settings(self, chunks: int, rpc_seconds: float = 10, **offload: Any) -> dict[str, Any]:
        """Of a connector that tries again soon, and whose deadlines no slow machine misses.
        offload: of its section.
        """
        more = {"policy": "write_through", "staging_bytes": f"{BUFFERS * (CHUNK_BYTES + 4096)} B"}
        more |= {"retry_seconds": 0.1, "lookup_seconds": 10, "get_seconds": 10, **offload}
        mooncake = {"master": self.depot.master.address, "hostname": "127.0.0.1"}
        mooncake |= {"rpc_seconds": rpc_seconds}
        pool, connector = {"segment_bytes": f"{chunks * CHUNK_BYTES} B"}, {"min_hit_tokens": CHUNK}
        return {"pool": pool, "connector": connector, "offload": {"mooncake": mooncake, **more}}

    def names(self) -> set[str]:
        return names_in(self.depot)

    def keep(self, tokens: list[int]) -> tuple[Answer, set[str]]:
        """Have it computed by `a`: its answer, and the names of its objects, once all its chunks
        are in the store.
        """
        known = set(self.first.chunk_keys())
        answer = self.a.one(tokens)
        new = {key[NAMESPACE_BYTES:].hex() for key in set(self.first.chunk_keys()) - known}
        assert len(new) == len(tokens) // CHUNK - answer.cached // CHUNK

        def objects() -> set[str]:
            return {name for name in self.names() if name.rpartition("/")[2] in new}

        return answer, eventually(lambda: len(found := objects()) == len(new) and found)

    def kept(self) -> tuple[list[int], Answer]:
        """A new prompt of four chunks and a tail: what `a`, which has it in its own cache
        and in the store, answers. The second node's pool is empty."""
        self.empty()
        tokens = new_tokens(HITS + 17)
        self.keep(tokens)
        return tokens, self.a.one(tokens)

    def hits_from_below(self, reader: Instance) -> None:
        """Once `a` and the reader can use the store again, all is as it was."""

        def written() -> bool:
            before = self.names()
            self.a.one(new_tokens(CHUNK + 1), max_tokens=1)
            time.sleep(0.05)
            return bool(self.names() - before)

        eventually(written)
        tokens, own = self.kept()

        def read() -> bool:
            self.empty()
            before = loaded(reader, "store")
            assert reader.again(tokens).said == own.said
            return loaded(reader, "store") == before + HITS

        eventually(read)
        # What it has read it stores in its pool again, beside its next steps.
        eventually(lambda: self.chunks() == HITS // CHUNK)

    def chunks(self) -> int:
        return int(self.second.stats().chunks)

    def empty(self) -> None:
        """The second node's pool holds nothing any more, and nothing is on its way there."""
        self.second.chunks()
        self.second.empty()


def loaded(instance: Instance, tier: str) -> int:
    return instance.counter("vllm:vcache_loaded_tokens", tier=tier)


pytestmark = [vllm_cases.needs_vllm, needs_mooncake]

UNCACHED = {"vcache": {"load": False, "store": False}}
FETCH = f"{vllm_cases.SESSION}.fetch"
PROMOTE = f"{OURS}.worker.stores:Stores.promote"
CALL = "vcache_backend.offload.store:Store.get"
"""In a thread of the reader's. A provider that hangs for long is taken for dead by its master, and
its objects are gone: a busy machine made that of some steps.
"""


@pytest.fixture(scope="module")
def depot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Depot]:
    """One that these tests break, and mend. Nobody takes a provider that is slow for dead: its
    objects would be gone."""
    with Depot(tmp_path_factory.mktemp("mooncake"), (64 * MIB,), client_ttl=600) as made:
        yield made


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, depot: Depot) -> Iterator[Two]:
    made = Two(tmp_path_factory.mktemp("vllm"), depot)
    with made.undo:
        # Until its offload process is there, what is asked is computed.
        made.hits_from_below(made.b)
        yield made


@pytest.fixture(scope="module")
def hasty(two: Two) -> Instance:
    """As `b`, but it does not wait long for a store that hangs."""
    hasty = two.settings(ROOM, rpc_seconds=1, lookup_seconds=1, get_seconds=2)
    made = two.second.connect("hasty", hasty)
    two.hits_from_below(made)
    return made


def alone(two: Two) -> tuple[list[int], vllm_cases.Answer]:
    """A short prompt for which nothing is cached, and what it is answered where nothing else
    runs.
    """
    tokens = new_tokens(40)
    return tokens, two.a.one(tokens, max_tokens=8, params=UNCACHED)


# ---- hits


@pytest.mark.parametrize("tail", [17, 0], ids=["and a tail", "whole chunks"])
def test_another_nodes_prefix_is_as_good_as_vllms_own(two: Two, tail: int) -> None:
    """And after that it is in the pool of this node."""
    two.empty()
    tokens = new_tokens(HITS + tail)
    had, stored = loaded(two.b, "store"), two.a.counter("vllm:vcache_stored_tokens")
    two.keep(tokens)
    own, wanted = two.a.one(tokens), HITS if tail else HITS - BLOCK
    assert two.a.counter("vllm:vcache_stored_tokens") - stored == HITS
    from_below = two.b.one(tokens)
    assert (own.cached, from_below.cached) == (wanted, wanted)
    assert from_below.said == own.said
    eventually(lambda: two.chunks() == 4)
    assert loaded(two.b, "store") - had == wanted
    pooled = loaded(two.b, "host")
    assert two.b.again(tokens).said == own.said
    assert (loaded(two.b, "store") - had, loaded(two.b, "host") - pooled) == (wanted, wanted)


def test_what_the_pool_has_in_between_comes_from_there(two: Two) -> None:
    tokens, own = two.kept()
    two.b.one(tokens)
    eventually(lambda: two.chunks() == 4)
    two.b.forget()
    with stopped_at(two.b, PIN) as place:
        place.while_there(lambda: None, Prompt(tokens))
    keys = place.seen[0]
    for kept in ([0, 2], [1, 3], [0, 1, 3]):
        with two.second.connection() as client:
            client.remove([key for chunk, key in enumerate(keys) if chunk not in kept])
        before = loaded(two.b, "store"), loaded(two.b, "host")
        answer = two.b.again(tokens)
        assert (answer.cached, answer.said) == (HITS, own.said)
        came = loaded(two.b, "store") - before[0], loaded(two.b, "host") - before[1]
        assert came == ((4 - len(kept)) * CHUNK, len(kept) * CHUNK)
        eventually(lambda: two.chunks() == 4)


def test_a_chunk_of_which_vllm_has_the_first_block_itself(two: Two) -> None:
    """It is read from the store, but not stored in the pool again: its first block may be from before
    a reset that vLLM's cache has outlived, which is known only when the request runs (`UntrustedBlocks`).
    """
    tokens, own = two.kept()
    assert two.b.one(tokens[: CHUNK + BLOCK + 1], params=UNCACHED).cached == 0
    before = loaded(two.b, "store")
    answer = two.b.one(tokens)
    assert (answer.cached, answer.said) == (HITS, own.said)
    assert loaded(two.b, "store") - before == HITS - CHUNK - BLOCK
    eventually(lambda: two.chunks() == 2)
    two.b.forget()
    again = two.b.one(tokens)
    assert (again.cached, again.said) == (HITS, own.said)
    assert loaded(two.b, "store") - before == HITS + CHUNK - BLOCK


def test_who_shares_in_place_offloads_what_it_saves_and_reads_what_others_have(two: Two) -> None:
    in_place = two.settings(ROOM) | vllm_cases.IN_PLACE
    router = vllm_cases.Router(two.second.folder, "c")
    tokens = new_tokens(HITS + 17)
    leaving_no_trace = {"vcache": {"store": False}}
    c = two.second.connect("c", in_place, **router.settings)
    c.ask("saves_late")
    assert c.one(tokens).cached == 0
    assert c.ask("told")
    own = c.one(tokens)
    assert c.counter("vllm:vcache_stored_tokens") == 0
    # What is in place, vLLM has announced, and nobody else.

    def found() -> dict[str, int]:
        return {medium: len(blocks) for medium, blocks in router.finds().items()}

    eventually(lambda: found() == {"GPU": HITS // BLOCK, "CPU": 0})
    # Nothing runs any more, so this is what the next request may overwrite.
    c.step(1)
    from_below = loaded(two.a, "store")
    hit = eventually(
        lambda: (answer := two.a.again(tokens, params=leaving_no_trace)).cached == HITS and answer
    )
    assert own.cached == HITS <= loaded(two.a, "store") - from_below
    assert hit.said == own.said
    c.one(new_tokens(3), max_tokens=1)
    saved = eventually(
        lambda: len(chunks := list(router.finds()["CPU"].values())) == HITS // CHUNK and chunks
    )
    assert saved == [tokens[: end + CHUNK] for end in range(0, HITS, CHUNK)]
    tokens, own = two.kept()
    hit = c.one(tokens)
    assert (hit.cached, own.cached, loaded(c, "store")) == (HITS, HITS, HITS)
    assert hit.said == own.said


# ---- failures


def test_a_store_that_hangs_costs_a_computation(two: Two, hasty: Instance) -> None:
    (tokens, computed), (beside, undisturbed) = two.kept(), alone(two)
    lost = hasty.counter("vllm:vcache_recomputed_tokens")
    master = two.depot.master
    with stopped_at(hasty, FETCH) as place:
        answers = place.while_there(master.stop, Prompt(tokens), Prompt(beside, max_tokens=8))
    assert hasty.counter("vllm:vcache_recomputed_tokens") - lost == HITS
    assert answers[0].agrees(computed)
    assert answers[1].agrees(undisturbed)
    fresh = new_tokens(HITS + 17)
    assert hasty.one(fresh).agrees(two.a.one(fresh, params=UNCACHED))
    assert hasty.again(tokens).agrees(computed)
    master.cont()
    for reader in (hasty, two.b):
        two.hits_from_below(reader)


def test_an_aborted_request_leaves_nothing_behind(two: Two) -> None:
    """It is aborted while the store is asked for its chunks: each time one buffer at least is with
    the store, and all of them have been once.
    """
    tokens, own = two.kept()
    failures = two.b.counter("vllm:vcache_failures")
    for _ in range(BUFFERS):
        with stopped_at(two.b, CALL) as call:
            two.b.add("waits", tokens)
            eventually(lambda: two.b.step(1) or call.reached)
            assert call.reached, "it did not wait for the store"
            two.b.ask("abort", "waits")
            two.b.step(3)
    assert two.b.counter("vllm:vcache_failures") == failures
    assert two.chunks() == 0
    answer = two.b.one(tokens)
    assert (answer.cached, answer.said) == (HITS, own.said)


def test_an_exception_while_chunks_are_fetched_is_a_miss(two: Two) -> None:
    (tokens, computed), (beside, undisturbed) = two.kept(), alone(two)
    with meddled(two.b, FETCH, "raise", times=1):
        answers = two.b.run(Prompt(tokens), Prompt(beside, max_tokens=8), together=True)
        assert answers[0].agrees(computed)
        assert answers[1].agrees(undisturbed)
    two.empty()
    eventually(lambda: (again := two.b.again(tokens)).cached == HITS and again.agrees(computed))


# ---- what is not taken from below


def test_after_a_reset_nothing_of_before_is_taken_from_below(two: Two) -> None:
    """A reset is for weights that have changed, and the store has the old ones' chunks. Nor is
    promoted what a load has taken before."""
    two.empty()
    tokens = new_tokens(HITS + 17)
    _, old = two.keep(tokens)
    namespace = bytes.fromhex(min(old).removeprefix(NAME_PREFIX).partition(".")[0])

    def reset() -> None:
        with two.second.connection() as client:
            client.clear(namespace, reset=True)

    with stopped_at(two.b, PROMOTE) as place:
        (answer,) = place.while_there(reset, Prompt(tokens))
    assert (answer.cached, two.b.ask("told"), two.chunks()) == (HITS, True, 0)
    assert two.b.ask("reset")
    before = two.names()
    two.b.one(new_tokens(5))
    assert two.b.one(tokens).cached == 0
    # What is stored from then on is below, under names of its own, and found there.
    eventually(lambda: len(two.names() - before) == HITS // CHUNK)
    assert old <= before
    two.empty()
    assert two.b.again(tokens).cached == HITS
