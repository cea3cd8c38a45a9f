"""Tables fit into eighty columns and lose nothing in fewer."""

from __future__ import annotations

import re

import msgspec
import pytest
from test_status import ONE, STATS, UUID, text_of

from vcache_backend import status, tables
from vcache_backend.proofs import Combination, Proof
from vcache_backend.protocol import messages as m
from vcache_backend.prove import shown


def test_instances_that_share_in_place_fit_into_eighty_columns() -> None:
    """And the JSON has all of each."""
    lacking = m.InstanceStats("ef" * 16, UUID, 0, 0, 0, 8, "its scheduler")
    proved = msgspec.structs.replace(ONE, vllm="0.99.0, proved 2026-12-01")
    stats = msgspec.structs.replace(STATS, instances=[proved, lacking])
    alone = text_of(msgspec.structs.replace(stats, segments=[]))
    assert "vcache segment add" not in alone, "nobody needs a pool"
    lines = text_of(stats, 80).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [" ".join(line.split()) for line in lines]
    assert "abababab 4194303 :8000 GPU-3c1f5a3e 0.4 s shares in place" in rows
    assert "efefefef – – GPU-3c1f5a3e 0.0 s lacks its scheduler" in rows
    assert "vllm 0.99.0, proved 2026-12-01" in rows
    assert status.summary(stats)["instances"][0] == status.plain(proved)
    assert status.summary(stats)["instances"][0]["id"] == "ab" * 16


def test_what_was_proved_fits_into_eighty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    made = Combination(vllm="0.99.0", torch="2.13.0+cpu", device="cpu", share="in_place")
    proof, rows = Proof(combination=made, date="2026-12-01", model=""), [shown("hits", 23, 24, "x")]
    for file, verdict in (("/f.json", "Proved: "), ("", "NOT proved: ")):
        tables.show(tables.findings(rows), *tables.proved(proof, file))
        said = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        assert max(map(len, said.splitlines())) <= 80
        assert f"{verdict}vLLM 0.99.0, torch 2.13.0+cpu, vcache " in said


def test_a_narrow_terminal_folds_lines_and_leaves_no_column_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    tables.show(tables.table(None, ("~first", "~second"), [("a" * 60, "b" * 60)]))
    shown = capsys.readouterr().out
    assert [shown.count(one) for one in "ab"] == [60, 60]
