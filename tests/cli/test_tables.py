"""Tables fit into eighty columns and lose nothing in fewer."""

from __future__ import annotations

import msgspec
import pytest
from test_status import ONE, STATS, UUID, text_of

from vcache_backend import status, tables
from vcache_backend.protocol import messages as m


def test_instances_that_share_in_place_fit_into_eighty_columns() -> None:
    """And the JSON has all of each."""
    lacking = m.InstanceStats("ef" * 16, UUID, 0, 0, 0, 8, "its scheduler")
    stats = msgspec.structs.replace(STATS, instances=[ONE, lacking])
    alone = text_of(msgspec.structs.replace(stats, segments=[]))
    assert "vcache segment add" not in alone, "nobody needs a pool"
    lines = text_of(stats, 80).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [" ".join(line.split()) for line in lines]
    assert "abababab 4194303 :8000 GPU-3c1f5a3e 0.4 s shares in place" in rows
    assert "efefefef – – GPU-3c1f5a3e 0.0 s lacks its scheduler" in rows
    assert status.summary(stats)["instances"][0] == status.plain(ONE)
    assert status.summary(stats)["instances"][0]["id"] == "ab" * 16


def test_a_narrow_terminal_folds_lines_and_leaves_no_column_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    tables.show(tables.table(None, ("~first", "~second"), [("a" * 60, "b" * 60)]))
    shown = capsys.readouterr().out
    assert [shown.count(one) for one in "ab"] == [60, 60]
