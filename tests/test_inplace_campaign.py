"""The in-place campaign, small: nothing is wrong whatever happens, and with one rule of the
protocol broken it is seen.
"""

from __future__ import annotations

import pytest

from benchmarks.inplace.instance import Control
from benchmarks.inplace.levels import CPU
from benchmarks.inplace.rows import control_row, rows
from benchmarks.inplace.run import campaign, run_control


def test_no_byte_is_wrong_though_blocks_are_used_again_while_they_are_read() -> None:
    result = campaign(loads=1000, seed=7, level=CPU._replace(stops=0.005, pause=0.15))
    seen = result.outcomes
    assert (seen.wrong, result.wrong) == (0, [])
    assert (seen.raised, result.ended) == (0, 0)
    assert seen.loads >= 1000
    assert seen.reuse_hits >= 10
    assert all(row.ok for row in rows(result, 1000))


@pytest.mark.parametrize("control", CPU.controls)
def test_it_is_seen_where_a_rule_of_the_protocol_is_broken(control: Control) -> None:
    result = run_control(control, seed=7, level=CPU._replace(stops=0.01, control_loads=0))
    assert result.outcomes.wrong > 0
    assert control_row(control, result, "cpu").ok
