"""No mishap around a load ends an engine: real vLLM on the CPU, whose loads out of another
instance's KV cache fail in every way.

A load is held at a place. There the reader, the owner or the server is stopped or killed, and the
owner uses the blocks again if it can. The request is computed, the one beside it is undisturbed,
every answer is vLLM's own, and the engine goes on and hits again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from processes import eventually
from vllm_cases import (
    BLOCK,
    CHUNK,
    OURS,
    Instance,
    Node,
    Prompt,
    meddled,
    missing,
    new_tokens,
    stopped_at,
)
from vllm_cases import quick as here
from vllm_models import TOKEN_BYTES

__all__ = ["here"]
pytestmark = [
    pytest.mark.skipif(bool(missing(())), reason=missing(()) or "vLLM is here"),
    pytest.mark.timeout(300),
]

IN_PLACE = {"connector": {"share": "in_place", "min_hit_tokens": CHUNK}}
SMALL = {"kv_cache_memory_bytes": 15 * BLOCK * TOKEN_BYTES, "max_model_len": 448}
"""KV blocks for 448 tokens: one more prompt uses all of them again."""
LOOKED_UP, PULL, VERDICT = (
    f"{OURS}.scheduler:SchedulerSide.allocated",
    "vcache_backend.vram_pool.copier:HostCopier.pull",
    "vcache_backend.transfer.resident:_ResidentPiece.settle",
)
"""Places: before a load is described, before its copy, and between its copy and the verdict."""
PAUSE_SECONDS = 0.6
"""More than twice as long as a lease or a connection holds by itself."""
LENGTH = 5 * CHUNK


class Trio:
    """An owner with few blocks, a reader, and vLLM alone. An owner that was killed is replaced."""

    def __init__(self, here: Node) -> None:
        self.here, self.aside = here, here.alone("aside")
        self.reader, self._owners = here.connect("reader", IN_PLACE), 0
        self.owner = self._new_owner()

    def _new_owner(self) -> Instance:
        self._owners += 1
        return self.here.connect(f"owner-{self._owners}", IN_PLACE, **SMALL)

    def kept(self) -> list[int]:
        """A prompt that the owner has computed and others can find."""
        tokens = new_tokens(LENGTH + 1)
        self.owner.one(tokens)
        assert self.owner.ask("told")
        return tokens

    def used_again(self) -> None:
        self.owner.one(new_tokens(6 * CHUNK))

    def pause(self, who: str) -> None:
        """Stop it while the owner, if it can, uses its blocks again."""
        process = {"reader": self.reader, "owner": self.owner, "server": self.here.server}[who]
        with process.stopped():
            if who == "reader":
                self.used_again()
            time.sleep(PAUSE_SECONDS)
        if who == "server":
            self.used_again()

    def kill(self, who: str) -> None:
        if who == "server":
            self.here.kill()
        else:
            self.owner.kill()

    def mend(self, who: str) -> None:
        if who == "server":
            self.here.serve_again(stores=False)
        else:
            self.owner = self._new_owner()

    def hits_again(self) -> None:
        unstored = {"vcache": {"store": False}}

        def hit() -> bool:
            tokens = self.kept()
            answer = self.reader.one(tokens, params=unstored)
            assert answer.agrees(self.aside.one(tokens))
            return answer.cached == LENGTH

        eventually(hit, 60)


@pytest.fixture(scope="module")
def trio(here: Node) -> Trio:
    return Trio(here)


def survives(trio: Trio, place: str, act: Callable[[], None]) -> None:
    tokens, beside = trio.kept(), Prompt(new_tokens(40), max_tokens=14)
    with stopped_at(trio.reader, place) as held:
        answers = held.while_there(act, Prompt(tokens), beside)
    for answer, prompt in zip(answers, (Prompt(tokens), beside), strict=True):
        assert answer.agrees(trio.aside.run(prompt)[0])
    assert trio.reader.alive
    # Nothing wrong is in its own cache.
    assert trio.reader.one(tokens).agrees(trio.aside.one(tokens))


@pytest.mark.parametrize("place", [LOOKED_UP, PULL, VERDICT], ids=["look-up", "copy", "verdict"])
@pytest.mark.parametrize("who", ["reader", "owner", "server"])
def test_a_pause_of_anybody_ends_no_engine(trio: Trio, who: str, place: str) -> None:
    survives(trio, place, lambda: trio.pause(who))
    trio.hits_again()


@pytest.mark.parametrize("place", [LOOKED_UP, PULL, VERDICT], ids=["look-up", "copy", "verdict"])
@pytest.mark.parametrize("who", ["owner", "server"])
def test_the_death_of_anybody_else_ends_no_engine(trio: Trio, who: str, place: str) -> None:
    survives(trio, place, lambda: trio.kill(who))
    trio.mend(who)
    trio.hits_again()


@pytest.mark.parametrize(
    "place",
    [
        f"{OURS}.load_specs:LoadSpecs.of",
        f"{OURS}.scheduler:SchedulerSide.plan",
        f"{OURS}.loads:Loads.begin",
        f"{OURS}.loads:Loads._advance",
        f"{OURS}.loads:Loads._note",
        f"{OURS}.report:Reporter.take",
        PULL,
        VERDICT,
    ],
    ids=lambda place: place.rpartition(":")[2],
)
def test_whatever_raises_around_a_load_ends_no_engine(trio: Trio, place: str) -> None:
    """Nor does a request wait for ever. Not meddled with are the few lines that hand over what failed."""
    tokens, beside = trio.kept(), Prompt(new_tokens(40), max_tokens=14)
    with meddled(trio.reader, place, "raise", times=1):
        answers = trio.reader.run(Prompt(tokens), beside, together=True)
    for answer, prompt in zip(answers, (Prompt(tokens), beside), strict=True):
        assert answer.agrees(trio.aside.run(prompt)[0])
    trio.hits_again()
