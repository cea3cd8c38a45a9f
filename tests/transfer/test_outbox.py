"""The outbox's thread outlives an exception anywhere in its loop: what comes later is done."""

from __future__ import annotations

from itertools import product

import pytest
from engine_cases import Node, Pair, counts, fresh, get, pair, put, raising
from kv_cases import CHUNK, prompt
from processes import eventually
from test_publisher import Owner

from vcache_backend.transfer.outbox import Outbox, at_once
from vcache_backend.transfer.store import PendingStore

__all__ = ["fresh", "pair"]
NOT_OF_THE_THREAD = "__init__ __len__ __repr__ close flush after submit known holds _returned"
NOT_OF_THE_THREAD += " _turn _beat _begin_within"


def of_thread(*classes: type) -> list[tuple[type, str, bool]]:
    """Methods that a thread runs, each twice: it raises before its work, and behind it."""
    others = NOT_OF_THE_THREAD.split()
    methods = [(one, name) for one in classes for name in vars(one) if name not in others]
    named = [pair for pair in methods if callable(vars(pair[0])[pair[1]])]
    return [(*pair, behind) for pair, behind in product(named, (False, True))]


def test_a_worker_goes_on_to_commit_and_leaves_no_reservation(pair: Pair, fresh: Node) -> None:
    for family, (where, name, behind) in enumerate(of_thread(Outbox, PendingStore), 2):
        if name == "give_up":
            continue  # after an exception
        with raising(where, name, behind):
            put(pair.writer, pair.mine, prompt(CHUNK))
            put(pair.writer, pair.mine, prompt(CHUNK, family))
        put(pair.writer, pair.mine, prompt(2 * CHUNK, family))
        assert get(pair.reader, pair.theirs, prompt(2 * CHUNK, family)) == 2 * CHUNK
        with fresh.client() as bystander:
            eventually(lambda bystander=bystander: counts(bystander) == (0, 0))


def test_a_thread_whose_work_always_raises_ends_with_close(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(fresh)

    def fail(outbox: Outbox) -> bool:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Outbox, "_do_first", fail)
    owner.publisher.outbox.after(at_once, owner.client.stats)
    eventually(lambda: owner.stats.snapshot()["failures"].get("thread: vcache-outbox", 0) > 1)
    owner.publisher.close(timeout=0.1)
    owner.close()
    assert not owner.publisher.outbox._thread.is_alive()
