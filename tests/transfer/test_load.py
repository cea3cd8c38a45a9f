"""The end of a load, and of an owner under it: whatever is read stays mapped, and no longer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from engine_cases import Node
from engine_cases import fresh as here
from kv_cases import CHUNK, prompt
from neighbour_cases import kv_mapped
from processes import Worker, eventually
from resident_cases import Reader, beside, owner_apart

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ResidentRun
from vcache_backend.resident.mappings import Neighbours
from vcache_backend.vram_pool.generations import GenerationView

__all__ = ["here"]


# ---- the end of an owner, and of a load


def apart(here: Node) -> tuple[Worker, Reader, torch.Tensor, ResidentRun]:
    """An owner in a process of its own, a reader that knows it, tokens, and where the owner has
    computed their chunks.
    """
    one, reader, tokens = owner_apart(here, 1), Reader(here), prompt(3 * CHUNK)
    there: ResidentRun = one.ask("compute", tokens, list(range(6)))
    reader.knows(1)
    return one, reader, tokens, there


@pytest.mark.parametrize(("kind", "look"), [(Neighbours, "get"), (GenerationView, "leading")])
def test_an_owner_that_ends_between_a_look_at_it_and_the_launch_stays_mapped(
    here: Node, monkeypatch: pytest.MonkeyPatch, kind: type, look: str
) -> None:
    """Nobody writes into its memory any more."""
    one, reader, tokens, there = apart(here)
    theirs = getattr(kind, look)

    def and_it_ends(*given: Any) -> Any:
        found = theirs(*given)
        one.kill()
        eventually(lambda: there.instance not in reader.neighbours._mapped)
        return found

    monkeypatch.setattr(kind, look, and_it_ends)
    assert reader.loaded(tokens, [there], known=False) == (6, "")
    assert not kv_mapped()


def test_an_abandoned_load_keeps_what_it_reads_mapped_until_its_copy_is_over(here: Node) -> None:
    one, reader, tokens, there = apart(here)
    reader.copier.finished.clear()
    load = reader.load(tokens, [there])
    assert load.run(0.01) == 0
    assert load.advance()
    one.kill()
    eventually(lambda: there.instance not in reader.neighbours._mapped)
    assert kv_mapped()
    del load
    reader.copier.finished.set()
    eventually(lambda: not kv_mapped())


def test_a_cancelled_load_begins_no_copy_and_lets_go_once_its_copy_is_over(here: Node) -> None:
    _, reader, tokens, there = beside(here, 3)
    early = reader.load(tokens, [there])
    early.cancel()
    assert early.advance()
    assert reader.copier.pulls == []
    reader.copier.finished.clear()
    load = reader.load(tokens, [there])
    assert not load.advance()
    load.cancel()
    assert not load.advance()
    left = reader.forgotten(there.instance)
    assert left() is not None
    reader.copier.finished.set()
    assert load.advance()
    assert left() is None


class Broken(threading.Event):
    """The completion of a device that failed."""

    def is_set(self) -> bool:
        raise VCacheError("planted")


@pytest.mark.parametrize("error", [VCacheError, RuntimeError, None])
def test_a_copy_that_fails_lets_go(here: Node, error: type[Exception] | None) -> None:
    """At its launch with an error, or on the device."""
    _, reader, tokens, there = beside(here, 2)

    def fail() -> None:
        if error is not None:
            raise error("planted")
        reader.copier.finished = Broken()

    reader.copier.half_way = fail
    assert reader.loaded(tokens, [there]) == (0, "copy")
    assert reader.forgotten(there.instance)() is None
