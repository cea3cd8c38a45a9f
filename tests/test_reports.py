"""Reports: what an instance tells the server, and a person then sees in its log, `vcache status` and `vcache doctor`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from processes import Child, Raw, Stage, stage
from test_cli import STATS, text_of, vcache

from vcache_backend import doctor, status
from vcache_backend.config import from_dict
from vcache_backend.doctor import Finding
from vcache_backend.errors import Refused, ServerUnavailable
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import wire
from vcache_backend.metadata_server.placement import Peer
from vcache_backend.metadata_server.records import ProcessId
from vcache_backend.metadata_server.reports import MAX_REPORTS, Reports

SEED = "stepped aside: PYTHONHASHSEED is not set"


@pytest.fixture
def stage_(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as made:
        yield made


@pytest.fixture
def server(stage_: Stage) -> Child:
    return stage_.server()


@pytest.fixture
def raw(stage_: Stage, server: Child) -> Raw:
    return stage_.raw()


def peer(number: int = 1, pid: int = 7) -> Peer:
    return Peer(number, ProcessId(pid, 1), "GPU-1", "cuda")


def reports(raw: Raw) -> list[Any]:
    reply = raw.ask("stats")
    assert reply is not None
    listed: list[Any] = reply[13]
    return listed


# ---- what is kept


def test_the_newest_are_kept_and_no_more() -> None:
    kept = Reports(iter(range(1000)).__next__)
    for number in range(MAX_REPORTS + 3):
        assert kept.add(peer(), "info", f"line {number}") == m.Reported(number, "info", 7, "GPU-1", f"line {number}")
    assert [report.text for report in kept.newest_last()] == [f"line {number}" for number in range(3, MAX_REPORTS + 3)]


def test_what_a_connection_says_again_is_one_report_with_a_new_time() -> None:
    kept = Reports(iter(range(10)).__next__)
    assert kept.add(peer(1), "warn", SEED) is not None
    assert kept.add(peer(2), "warn", "another") is not None
    assert kept.add(peer(1), "warn", SEED) is None
    assert [(report.time, report.text) for report in kept.newest_last()] == [(1, "another"), (2, SEED)]
    assert kept.add(peer(2), "warn", SEED) is not None


def test_a_report_is_one_line_that_a_terminal_cannot_be_fooled_with() -> None:
    reported = Reports(lambda: 0.0).add(peer(), "error", "one\n2026-01-01 INFO forged\x1b[2J\u202e\ttwo\0 ")
    assert reported is not None
    assert reported.text == "one 2026-01-01 INFO forged [2J two"


# ---- the protocol


def test_a_report_survives_the_wire_as_a_plain_array() -> None:
    (body,) = wire.FrameReader().feed(wire.frame(m.Report("warn", SEED)))
    assert msgpack.unpackb(body) == ["report", "warn", SEED]
    assert wire.request_decoder.decode(body) == m.Report("warn", SEED)


def test_a_report_is_kept_with_time_process_and_device(raw: Raw) -> None:
    before = time.time()
    assert reports(raw) == []
    assert raw.ask("report", "error", SEED) == ["count", 1]
    assert raw.ask("report", "error", SEED) == ["count", 0]
    ((when, *rest),) = reports(raw)
    assert rest == ["error", os.getpid(), "host", SEED]
    assert before <= when <= time.time()


@pytest.mark.parametrize("message", [("fatal", "text"), ("info", ""), ("info", "x" * 1025), ("info",), ("info", 5)], ids=str)
def test_a_report_that_is_none_is_refused_and_the_connection_stays(raw: Raw, message: tuple[Any, ...]) -> None:
    reply = raw.ask("report", *message)
    assert reply is not None
    assert (reply[0], reply[2]) == ("error", False)
    assert reports(raw) == []
    assert raw.ask("report", "info", "x" * 1024) == ["count", 1]


def test_reports_outlive_their_connection_and_not_the_server(stage_: Stage, server: Child, raw: Raw) -> None:
    raw.ask("report", "info", SEED)
    raw.close()
    assert [report[4] for report in reports(stage_.raw())] == [SEED]
    server.kill()
    stage_.server()
    assert reports(stage_.raw()) == []


def test_stats_of_a_server_without_reports_and_with_more_than_them_are_read() -> None:
    """So the protocol's version stays: an older peer finds what it knows, and a newer one does without what is missing."""
    body = msgpack.unpackb(wire.encoder.encode(STATS))
    assert body[13] == []
    for other in (body[:13], [*body, "of tomorrow"]):
        assert wire.reply_decoder.decode(msgpack.packb(other)) == STATS


def test_an_older_server_refuses_it_and_keeps_the_connection(raw: Raw) -> None:
    """What a server does with a request of tomorrow, which a report is to one of yesterday."""
    reply = raw.ask("reportage", "info", SEED)
    assert reply is not None
    assert (reply[0], reply[2]) == ("error", False)
    assert raw.ask("report", "info", SEED) == ["count", 1]


# ---- the client


def test_a_client_reports_and_says_whether_it_was_news(stage_: Stage, server: Child) -> None:
    client = stage_.client(device="GPU-3")
    assert client.report("warn", SEED) is True
    assert client.report("warn", SEED) is False
    assert stage_.client().report("warn", SEED) is True
    assert [(report.level, report.device, report.text) for report in client.stats().reports] == [
        ("warn", "GPU-3", SEED),
        ("warn", "host", SEED),
    ]
    assert client.report("info", "x" * 5000)
    assert client.stats().reports[-1].text == "x" * 1024


def test_a_report_that_cannot_be_made_raises_as_every_call_does(stage_: Stage) -> None:
    with pytest.raises(ServerUnavailable):
        stage_.client().report("info", SEED)
    stage_.server()
    client = stage_.client()
    with pytest.raises(Refused):
        client.report("info", "")
    assert client.connected


# ---- what a person sees


def test_the_server_logs_a_report_once(stage_: Stage) -> None:
    server = stage_.server()
    raw = stage_.raw()
    for level, text in (("error", SEED), ("error", SEED), ("warn", "second"), ("info", "third")):
        raw.ask("report", level, text)
    assert "ERROR" in server.expect(SEED)
    second = server.expect("reports:")
    assert f"WARNING pid {os.getpid()} on host reports: second" in second
    assert "INFO" in server.expect("third")


def test_status_shows_reports_under_the_table_newest_first() -> None:
    told = [m.Reported(1.0, "warn", 12, "GPU-a", SEED), m.Reported(2.0, "error", 34, "GPU-b", "word " * 200)]
    stats = msgspec.structs.replace(STATS, reports=told)
    text = text_of(status.render(stats))
    assert text.index("Namespaces") < text.index("Reports") < text.index("GPU-b") < text.index("GPU-a")
    assert text.count("word") == 200
    assert "Reports" not in text_of(status.render(STATS))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.0))
    row = next(line for line in text.splitlines() if "GPU-a" in line)
    assert row.split() == [*when.split(), "warn", "12", "GPU-a", *SEED.split()]


def test_status_as_json_names_the_fields(stage_: Stage, server: Child, raw: Raw) -> None:
    raw.ask("report", "warn", SEED)
    said = msgspec.json.decode(vcache("status", "--json", "--socket", str(stage_.path)).stdout)
    ((told),) = said["reports"]
    assert (told["level"], told["pid"], told["device"], told["text"]) == ("warn", os.getpid(), "host", SEED)


def found(stage_: Stage) -> list[Finding]:
    findings = doctor.check_server(from_dict({"server": {"socket": str(stage_.path)}}))
    return [finding for finding in findings if finding.check.startswith("report")]


def test_the_doctor_has_nothing_to_say_without_a_server_or_reports(stage_: Stage) -> None:
    assert found(stage_) == []
    stage_.server()
    stage_.raw().ask("report", "info", "all is well")
    assert found(stage_) == []


def test_the_doctor_fails_for_an_error_of_a_process_that_runs(stage_: Stage, server: Child, raw: Raw) -> None:
    raw.ask("report", "error", SEED)
    raw.ask("report", "warn", "slow")
    warning, error = found(stage_)
    assert (error.check, error.status) == (f"report of pid {os.getpid()}", "fail")
    assert error.detail.endswith(f", {SEED}")
    assert (warning.status, warning.detail.endswith(", slow")) == ("warn", True)
    assert error.advice
    assert warning.advice
    out = vcache("doctor", "--json", "--socket", str(stage_.path), expect=1).stdout
    assert SEED in out


def test_an_error_of_a_process_that_is_gone_is_a_warning(stage_: Stage, server: Child) -> None:
    code = "from processes import Raw; import sys; from pathlib import Path; Raw(Path(sys.argv[1])).ask('report', 'error', 'bye')"
    with Child([sys.executable, "-c", code, str(stage_.path)]) as child:
        assert child.wait()[0] == 0
    (finding,) = found(stage_)
    assert (finding.status, finding.check) == ("warn", f"report of pid {child.pid}")
    assert "bye" in finding.detail
    assert "gone" in finding.advice


def test_what_is_older_than_an_hour_is_no_finding(
    stage_: Stage, server: Child, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.ask("report", "error", SEED)
    assert len(found(stage_)) == 1
    later = time.time() + 3700
    monkeypatch.setattr(time, "time", lambda: later)
    assert found(stage_) == []


def test_a_hung_server_is_a_finding_and_no_long_wait(stage_: Stage, server: Child) -> None:
    with server.stopped():
        assert found(stage_) == []
