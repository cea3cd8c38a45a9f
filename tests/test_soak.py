"""The soak, small: nothing is wrong whatever happens, and with one rule of the protocol broken it
is seen. `make soak` is the long one, and has whole vLLMs, too.
"""

from __future__ import annotations

from math import inf

import pytest
from processes import python_path
from soak.levels import INPLACE, SOAK
from soak.living import Control, Role
from soak.run import faults, run, run_control

FEW: dict[Role, int] = {"owner": 2, "reader": 2}


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process that processes are forked from finds what it is to import: by itself it
    would leave that to each of them, and say nothing.
    """
    monkeypatch.setenv("PYTHONPATH", python_path())


def test_no_byte_is_wrong_though_blocks_are_used_again_while_they_are_read() -> None:
    level = INPLACE._replace(counts=FEW, loads=100, stops=0.005, pause=2.0)
    # Not every mishap happens in so short a time.
    assert faults(run(7, level), level._replace(mishaps={})) == []


def test_instances_share_again_after_every_reset() -> None:
    level = INPLACE._replace(mishaps={"namespaces reset": 1}, counts=FEW, reuse_hits=0.0)
    level = level._replace(loads=200, pause=10.0)
    assert faults(run(7, level), level) == []


@pytest.mark.parametrize("control", INPLACE.controls)
def test_it_is_seen_where_a_rule_of_the_protocol_is_broken(control: Control) -> None:
    level = INPLACE._replace(counts=FEW, stops=0.01, control_seconds=inf)
    assert run_control(control, 7, level).outcomes.wrong


def test_it_is_seen_where_readers_of_the_pool_do_not_compare_generations() -> None:
    level = SOAK._replace(counts={"worker": 3}, stops=0.02, longest_stop=0.6, control_seconds=inf)
    assert run_control("no comparison", 7, level).wrong


def test_no_byte_out_of_the_pool_is_wrong_whatever_happens_to_workers_and_server() -> None:
    level = SOAK._replace(counts={"worker": 3}, loads=50, pause=2.0)
    result = run(7, level)
    assert faults(result, level._replace(mishaps={})) == []
    assert result.mishaps
