"""Nothing that happens around a load ends an engine. Real vLLM on the CPU, in-place sharing.

A test holds the reader's load at a place. There it pauses or kills the reader's peer, or has the
code of the place raise. Then every answer is equal to a computed one, also that of a second request
in the same batch. The engine goes on, and its next loads succeed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from processes import eventually
from vllm_cases import (
    BLOCK,
    CHUNK,
    OURS,
    Answer,
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
"""KV blocks for 448 tokens: the next prompt of 6 chunks takes them from the prompt before."""
LOOKED_UP, COPY, VERDICT = (
    f"{OURS}.scheduler.side:SchedulerSide.allocated",
    "vcache_backend.vram_pool.copies.copier:HostCopier.pull",
    "vcache_backend.transfer.resident:_ResidentPart.settle",
)
"""Places: before a load is described, before its copy, and between the copy and the verdict."""
PAUSE_SECONDS = 0.4
LENGTH = 5 * CHUNK


class Trio:
    """An owner with few blocks, a reader, and vLLM without a connector, which computes."""

    def __init__(self, here: Node) -> None:
        self.here, self.computing = here, here.alone("computing")
        self.reader, self._owners = here.connect("reader", IN_PLACE), 0
        self.new_owner()

    def new_owner(self) -> None:
        self._owners += 1
        self.owner = self.here.connect(f"owner-{self._owners}", IN_PLACE, **SMALL)

    def kept(self) -> list[int]:
        """A prompt that the owner has computed and the reader can find."""
        tokens = new_tokens(LENGTH + 1)
        self.owner.one(tokens)
        assert self.owner.ask("told")
        return tokens

    def reuse(self) -> None:
        """The owner gives the blocks of its last prompt to another prompt."""
        self.owner.one(new_tokens(6 * CHUNK))

    def compare(self, answers: Sequence[Answer], *prompts: Prompt) -> None:
        """The answers are equal to computed ones, and so is the next one to the first prompt: the
        reader's own prefix cache has nothing wrong.
        """
        for answer, prompt in zip(answers, prompts, strict=True):
            assert answer.agrees(self.computing.run(prompt)[0])
        tokens = prompts[0].tokens
        assert self.reader.one(tokens).agrees(self.computing.one(tokens))

    def loads_again(self) -> None:
        """Sooner or later the reader loads a whole prompt again."""

        def loaded() -> bool:
            tokens = self.kept()
            answer = self.reader.one(tokens)
            assert answer.agrees(self.computing.one(tokens))
            return answer.cached == LENGTH

        eventually(loaded)


@pytest.fixture(scope="module")
def trio(here: Node) -> Trio:
    return Trio(here)


def pause_reader(trio: Trio) -> None:
    """Longer than a request to the server may take. Meanwhile the owner reuses the blocks."""
    with trio.reader.stopped():
        trio.reuse()
        time.sleep(PAUSE_SECONDS)


def pause_owner(trio: Trio) -> None:
    with trio.owner.stopped():
        time.sleep(PAUSE_SECONDS)


def pause_server(trio: Trio) -> None:
    with trio.here.server.stopped():
        time.sleep(PAUSE_SECONDS)
    trio.reuse()


def kill_owner(trio: Trio) -> None:
    trio.owner.kill()
    trio.new_owner()


def kill_server(trio: Trio) -> None:
    trio.here.kill()
    trio.here.serve()


@pytest.mark.parametrize(
    ("act", "place"),
    [
        (pause_reader, LOOKED_UP),
        (pause_reader, COPY),
        (pause_reader, VERDICT),
        (pause_owner, COPY),
        (pause_server, VERDICT),
        (kill_owner, COPY),
        (kill_server, VERDICT),
    ],
    ids=lambda one: one.__name__ if callable(one) else one.rpartition(".")[2],
)
def test_a_pause_or_death_around_a_load_ends_no_engine(
    trio: Trio, act: Callable[[Trio], None], place: str
) -> None:
    prompts = Prompt(trio.kept()), Prompt(new_tokens(40), max_tokens=14)
    with stopped_at(trio.reader, place) as held:
        answers = held.while_there(lambda: act(trio), *prompts)
    trio.compare(answers, *prompts)
    trio.loads_again()


@pytest.mark.parametrize(
    "place",
    [
        f"{OURS}.scheduler.load_specs:LoadSpecs.of",
        f"{OURS}.worker.loads:Loads.begin",
        f"{OURS}.worker.loads:Loads._advance",
        f"{OURS}.worker.report:Reporter.take",
    ],
    ids=lambda place: place.rpartition(":")[2],
)
def test_an_exception_around_a_load_ends_no_engine(trio: Trio, place: str) -> None:
    """Each request gets an answer: none waits for ever."""
    prompts = Prompt(trio.kept()), Prompt(new_tokens(40), max_tokens=14)
    with meddled(trio.reader, place, "raise", times=1):
        answers = trio.reader.run(*prompts, together=True)
    trio.compare(answers, *prompts)
    trio.loads_again()
