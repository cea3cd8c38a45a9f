"""Reports: what an instance tells the server, and a person then sees in its log, `vcache status`
and `vcache doctor`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
import pytest
from processes import SECONDS, Stage
from test_cli import vcache

from vcache_backend import doctor
from vcache_backend.config import from_dict
from vcache_backend.doctor import Finding
from vcache_backend.errors import Refused
from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.metadata_server.report import Layouts, Minute, Reports, fitting
from vcache_backend.metadata_server.requests import Service
from vcache_backend.protocol import messages as m
from vcache_backend.protocol import sockets

SEED = "stepped aside: PYTHONHASHSEED is not set"


def peer(number: int = 1, pid: int = 7) -> Peer:
    return Peer(number, ProcessId(pid, 1), "GPU-1", "cuda")


def made(**more: Any) -> Service:
    return Service(1, now=lambda: 0.0, **more)


def test_fields_that_follow_from_a_setting_come_behind_it_and_say_so() -> None:
    """Two sizes of tensor parallelism also differ in fields that no flag of vLLM sets."""
    layouts = Layouts()
    for number, tp_size in enumerate("12"):
        fields = dict.fromkeys(("extra.shards", "kv_layout", "tp_size"), tp_size)
        layouts.add(peer(number), {"model": "llama", "namespace": 2 * tp_size, **fields})
    found = [(one.field, one.advice) for one in layouts.mismatches()]
    assert [field for field, _ in found] == ["tp_size", "extra.shards", "kv_layout"]
    assert [advice.startswith("it follows from") for _, advice in found] == [False, True, True]


# ---- the server and its clients


def test_a_report_is_logged_once_and_kept_beyond_its_connection(alone: Stage) -> None:
    server = alone.server()
    with alone.client(device="GPU-3") as client:
        assert client.report("warn", SEED) is True
        assert alone.client().report("warn", SEED) is True
        assert client.report("info", "x" * 5000)
        again = time.time()
        assert client.report("warn", SEED) is False
        with pytest.raises(Refused):
            client.report("info", "")
        assert client.connected
    _, long, last = alone.client().stats().reports
    assert last == m.Reported(last.time, "warn", os.getpid(), "GPU-3", SEED)
    assert long.time <= again <= last.time <= time.time()
    assert long.text == "x" * 1024
    line = server.expect("stepped aside")
    assert " WARNING " in line
    assert line.endswith(f": pid {os.getpid()} on GPU-3 reports: {SEED}")
    assert "INFO" in server.expect("xxx")


def test_statistics_stay_readable_with_more_reports_and_segments_than_fit(memfd: int) -> None:
    service = made(max_segments=4096)
    text = "\N{SNOWMAN}" * 1000 + "\N{GRINNING FACE}" * 20
    for number in range(Reports.MOST):
        service.answer(peer(), m.Report("info", f"{number} {text}"), [])
    for number in range(m.MAX_SEGMENTS + 1):
        fds, id_ = [os.dup(memfd)], m.SegmentId(f"{number:064}")
        service.answer(peer(), m.AddSegment(id_, "\N{GRINNING FACE}" * 64, "host", 4096), fds)
        sockets.close_fds(fds)
    for number in range(200):
        layout = {"model": "m", "namespace": f"{number}" + "\u202e" * 99}
        service.layouts.add(client := peer(number), layout)
        service.layouts.looked_up(client, 1 << 32, 1 << 32)
    stats, segments = (service.answer(peer(), ask, [])[0] for ask in (m.Stats(), m.ListSegments()))
    assert sockets.encode(segments)
    assert sockets.encode(stats)
    assert len(stats.segments) == len(segments.segments) == m.MAX_SEGMENTS
    assert stats.reports[-1].text.startswith(f"{Reports.MOST - 1} ")
    assert next(reversed(stats.hits)).startswith("199")
    service.close()


def test_statistics_fit_a_message_however_many_processes_left_slots_in_quarantine() -> None:
    id_, device = m.SegmentId("s" * 64), "\N{GRINNING FACE}" * 64
    segments = [m.SegmentInfo(id_, device, "host", m.MAX_SEGMENT_BYTES)] * m.MAX_SEGMENTS
    stats = m.ServerStats(1, 1.0, 1, 0, 0, {}, {}, {}, segments, {}, 1)
    left = dict.fromkeys(range(1 << 20, (1 << 20) + 30_000), 1)
    whole = msgspec.structs.replace(stats, quarantined_slots=left)
    assert len(sockets.encode(fitting(whole))) > m.MAX_MESSAGE_BYTES // 2


# ---- what a person sees


def found(stage: Stage) -> list[Finding]:
    """What the doctor finds of reports."""
    findings = doctor.check_server(from_dict({"server": {"socket": str(stage.path)}}))
    return [finding for finding in findings if finding.check.startswith("report")]


def test_a_recent_error_fails_the_doctor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", SECONDS)
    stage.raw().ask("report", "info", "all is well")
    assert found(stage) == []
    stage.raw().ask("report", "error", SEED)
    stage.raw().ask("report", "warn", "slow")
    warning, error = found(stage)
    assert (error.check, error.status) == (f"report of pid {os.getpid()}", "fail")
    assert error.detail.endswith(f", {SEED}")
    assert (warning.status, warning.detail.endswith(", slow")) == ("warn", True)
    assert error.advice
    assert warning.advice
    assert SEED in vcache("doctor", "--json", "--socket", str(stage.path), expect=1).stdout
    shown = msgspec.json.decode(vcache("status", "--json", "--socket", str(stage.path)).stdout)
    told = {"level": "error", "pid": os.getpid(), "device": "host", "text": SEED}
    assert told.items() <= shown["reports"][-2].items()
    later = time.time() + 3700
    monkeypatch.setattr(time, "time", lambda: later)
    assert found(stage) == []


def test_the_last_minute_forgets_what_is_older() -> None:
    minute = Minute(lambda: now)
    for at in (100.0, 100.9, 130.0, 160.5):
        now = at
        minute.add(1, 256)
    assert minute.total() == (2, 512), "those of the first second have gone together"
    now = 1000.0
    assert minute.total() == (0, 0)
