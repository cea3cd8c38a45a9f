"""Generation tables of others, as a scheduler looks at them. Real processes, a real server."""

from __future__ import annotations

import os
import time
from contextlib import closing

import pytest
from neighbour_cases import added_to, descriptors, instance, owner
from processes import PATIENT, QUICK, Stage, asked, eventually, hung

from vcache_backend.resident.tables import ENDS_SECONDS, MAX_REFUSED, Refusals, Tables
from vcache_backend.vram_pool.generations import GenerationView

ONE, TWO = instance(1), instance(2)


def there(tables: Tables, name: bytes = ONE) -> GenerationView:
    return eventually(lambda: tables.view(name))


def test_a_killed_owners_table_is_forgotten(stage: Stage) -> None:
    """Once, though somebody else holds the same pidfd, as the server does: epoll would go on
    telling of it, under a number that is another's by then."""
    client = stage.client()
    with owner(stage) as part, owner(stage, 2), closing(Tables(client)) as tables:
        _, held = client.open_instance(ONE)
        before = descriptors()
        there(tables)
        part.kill()
        eventually(lambda: tables.view(ONE) is None)
        assert not added_to(before)
        count = asked(client, "OpenInstance")
        assert [tables.view(ONE) for _ in range(9)] == [None] * 9
        assert asked(client, "OpenInstance") == count
        again = there(tables, TWO)
        for _ in range(3):
            time.sleep(2 * ENDS_SECONDS)  # so that it looks for ends again
            assert tables.view(TWO) is again
        assert tables.view(ONE) is None
        for fd in held:
            os.close(fd)


def test_a_table_outlives_the_server_and_an_owner_s_death_is_noticed(stage_: Stage) -> None:
    server = stage_.server()
    with owner(stage_, 1, QUICK) as part, closing(Tables(client := stage_.client(QUICK))) as tables:
        view = there(tables)
        server.kill()
        eventually(lambda: not client.connected)
        assert tables.view(ONE) is view
        assert tables.view(TWO) is None
        part.kill()
        eventually(lambda: tables.view(ONE) is None)


def test_a_hung_server_is_a_miss_for_a_while(
    stage_: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcache_backend.resident.tables.RETRY_SECONDS", 1000.0)
    server = stage_.server()
    with owner(stage_), closing(Tables(client := stage_.client(PATIENT))) as tables:
        # By a call: no heartbeat notices before.
        with hung(server, client):
            assert tables.view(ONE) is None
        eventually(lambda: client.connected)
        assert tables.view(ONE) is None
        with closing(Tables(stage_.client())) as others:
            there(others)


def test_what_was_refused_is_remembered_but_not_without_bound() -> None:
    refused = Refusals()
    for number in range(MAX_REFUSED + 1):
        refused.add(instance(number))
    refused.add(instance(5), 0.0)
    expected = [False, True, False, True]
    assert [instance(number) in refused for number in (0, 1, 5, MAX_REFUSED)] == expected
