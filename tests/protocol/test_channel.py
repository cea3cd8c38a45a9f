"""The thread of a connection outlives an exception anywhere in its loop."""

from __future__ import annotations

from itertools import product
from typing import Any

from engine_cases import raising
from processes import QUICK, Stage, eventually

from vcache_backend.protocol import channel
from vcache_backend.protocol.channel import Channel
from vcache_backend.protocol.client import Client


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
