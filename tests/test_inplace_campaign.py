"""The campaigns, small: nothing is wrong whatever happens, and with one rule of the protocol broken
it is seen.
"""

from __future__ import annotations

import pytest

from benchmarks.campaign.levels import CPU, SOAK
from benchmarks.campaign.living import Control, Role
from benchmarks.campaign.rows import control_row, rows
from benchmarks.campaign.run import campaign, run_control
from benchmarks.results import Row

FEW: dict[Role, int] = {"owner": 2, "reader": 2}


def missed(rows: list[Row]) -> list[str]:
    """Rows that missed their limit. Not every mishap happens in so short a time."""
    return [row.case for row in rows if not row.ok and "mishaps" not in row.case]


def test_no_byte_is_wrong_though_blocks_are_used_again_while_they_are_read() -> None:
    level = CPU._replace(stops=0.005, pause=0.15)
    result = campaign(loads=500, seed=7, level=level)
    assert result.wrong == []
    assert missed(rows(result, 500, "cpu", level)) == []


def test_instances_share_again_after_every_reset() -> None:
    resets = {"namespaces reset": 1}
    level = CPU._replace(mishaps=resets, counts=FEW, reuse_hits=0.0, pause=0.3, seconds=20.0)
    result = campaign(loads=400, seed=7, level=level)
    assert missed(rows(result, 400, "cpu", level)) == []
    assert result.mishaps


@pytest.mark.parametrize("control", CPU.controls)
def test_it_is_seen_where_a_rule_of_the_protocol_is_broken(control: Control) -> None:
    level = CPU._replace(counts=FEW, stops=0.01, control_loads=0)
    assert control_row(control, run_control(control, seed=7, level=level), "cpu").ok


@pytest.mark.timeout(400)
def test_no_byte_out_of_the_pool_is_wrong_whatever_happens_to_workers_and_server() -> None:
    """`make soak` is the long one, and has a control: an engine that believes in a lost lease. What
    comes of that, test_engine_failures shows.
    """
    level = SOAK._replace(counts={"worker": 3}, pause=0.15)
    result = campaign(loads=100, seed=7, level=level)
    assert result.wrong == []
    assert missed(rows(result, 100, "soak", level)) == []
    assert result.mishaps
