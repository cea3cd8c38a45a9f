"""Every thread outlives an exception anywhere in its loop: what comes later is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
from engine_cases import Node, Pair, counts, fresh, get, pair, put
from kv_cases import CHUNK, prompt
from processes import QUICK, Stage, eventually
from test_publisher import Owner, Step

from vcache_backend.protocol import channel
from vcache_backend.protocol.channel import Channel
from vcache_backend.protocol.client import Client
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.store import PendingStore

__all__ = ["fresh", "pair"]


@contextmanager
def raising(owner: Any, name: str, behind: bool = False, times: int = 1) -> Iterator[None]:
    """The first calls raise in any thread but this one, before or behind the work. Fails if there
    were fewer."""
    original, left = getattr(owner, name), times

    def raises(*given: Any) -> Any:
        nonlocal left
        fails = left > 0 and threading.current_thread() is not threading.main_thread()
        left -= fails
        answer = None if fails and not behind else original(*given)
        if fails:
            raise RuntimeError(f"on purpose, in {name}")
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, raises)
        yield
        try:
            eventually(lambda: left <= 0)
        except AssertionError as error:
            raise AssertionError(f"nobody called {name}") from error


NOT_OF_THE_THREAD = "__init__ __len__ __repr__ close flush send after submit known holds _returned"
NOT_OF_THE_THREAD += " _turn _beat _has_work _begin_within"


def of_thread(*classes: type) -> list[tuple[type, str, bool]]:
    """Methods that a thread runs, each twice: it raises before its work, and behind it."""
    others = NOT_OF_THE_THREAD.split()
    methods = [(one, name) for one in classes for name in vars(one) if name not in others]
    named = [pair for pair in methods if callable(vars(pair[0])[pair[1]])]
    return [(*pair, behind) for pair, behind in product(named, (False, True))]


class Endless(Step):
    """One of which nobody can tell whether it is over."""

    def reached(self) -> bool:
        raise RuntimeError("on purpose")

    done = reached

    def wait(self, seconds: float) -> bool:
        return self.reached()


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


def test_a_listener_that_raises_is_told_of_the_next_store(pair: Pair) -> None:
    heard = list[Any]()

    def listen(keys: list[Any]) -> None:
        heard.append(keys)
        raise RuntimeError("on purpose")

    pair.writer._session.on_stored.append(listen)
    for family in (1, 2):
        put(pair.writer, pair.mine, prompt(CHUNK, family))
        assert get(pair.reader, pair.theirs, prompt(CHUNK, family)) == CHUNK
    assert len(heard) == 2


def test_a_copy_of_which_nobody_can_tell_whether_it_is_over_holds_up_no_store(
    pair: Pair, fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier, gather = pair.writer._session.copier, pair.writer._session.copier.gather
    monkeypatch.setattr(copier, "gather", lambda *given: (gather(*given), Endless())[1])
    put(pair.writer, pair.mine, prompt(CHUNK))
    monkeypatch.setattr(copier, "gather", gather)
    put(pair.writer, pair.mine, prompt(CHUNK, 2))
    assert get(pair.reader, pair.theirs, prompt(CHUNK, 2)) == CHUNK
    assert get(pair.reader, pair.theirs, prompt(CHUNK)) == 0
    with fresh.client() as bystander:
        # Its slot is not used again: the copy may still write.
        assert counts(bystander) == (1, 0)


def test_a_thread_whose_work_always_raises_ends_with_close(
    fresh: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(fresh)
    monkeypatch.setattr(Outbox, "_send_all", Endless.reached)
    owner.publisher.outbox.send(owner.client.stats)
    eventually(lambda: owner.stats.snapshot()["failures"].get("thread: vcache-outbox", 0) > 1)
    owner.publisher.close(timeout=0.1)
    owner.close()
    assert not owner.publisher.outbox._thread.is_alive()


def test_a_client_goes_on_to_beat_and_to_return(alone: Stage) -> None:
    """To a server that was killed, with its hooks called."""
    server, beats, returns = alone.server(), list[int](), list[int]()
    client = Client(alone.path, QUICK)
    client.on_beat.append(lambda: beats.append(1))
    client.on_return.append(lambda: returns.append(1))
    names = "_try_connect _greet _no_connection _start_again"
    places: list[tuple[Any, str]] = [(channel, "_call_all")]
    places += [(Channel, name) for name in names.split()]
    for (where, name), behind in product(places, (False, True)):
        before = len(returns)
        with raising(where, name, behind):
            server.kill()
            eventually(lambda: not client.connected)
            server = alone.server()
        eventually(lambda before=before: client.connected and len(returns) > before)
        count = len(beats)
        eventually(lambda count=count: len(beats) > count)
    client.close()
    assert not client._keeper.is_alive()


def test_a_hook_that_raises_after_a_reconnection_is_called_again(alone: Stage) -> None:
    server, calls = alone.server(), list[int]()
    client = Client(alone.path, QUICK)

    def register() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise RuntimeError("on purpose")

    client.on_return.append(register)
    server.kill()
    eventually(lambda: not client.connected)
    alone.server()
    eventually(lambda: len(calls) == 3)
    client.close()
