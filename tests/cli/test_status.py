"""What `vcache status` shows: the picture of a server's statistics, and the summary that programs
read.
"""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from processes import ROOT, ran, stage
from rich.console import Console

from vcache_backend import monitor, status, tables
from vcache_backend.protocol import messages as m

ID = m.SegmentId("0123456789ab")
SEGMENT = m.SegmentInfo(ID, "GPU-3c1f", "cuda", 8 << 30, 6 << 30, chunks=1536)
COUNTERS = {"lookup_chunks": 200, "promised_chunks": 1234, "promised_chunks_broken": 12}
COUNTERS |= {"awaited_tokens": 6144, "waited_milliseconds": 3250}
LATENCY = {"lookup": m.Latency(40, 12.5, 80.25), "clear": m.Latency(0, 0, 0)}
NAMESPACES = {"00ff00ff00ff00ff": "llama bf16"}
HITS = {"00ff00ff00ff00ff": (1600, 1280), "11": (400, 220)}
TABLES: Any = (COUNTERS, LATENCY, [SEGMENT], NAMESPACES, 50 << 20)
STATS = m.ServerStats(5, 93784, 3, 1536, 1, {}, *TABLES, hits=HITS)
"""Behind the run: seconds, clients, chunks, a reservation, none in quarantine."""
UUID = "GPU-3c1f5a3e-1111-2222-3333-444444444444"
ONE = m.InstanceStats("ab" * 16, UUID, 4_194_303, 2_097_152, 131_072, name=":8000", silent=0.4)
OTHER = m.InstanceStats("cd" * 16, UUID, 4_194_304, 2_097_152, 131_072, name=":8001", silent=0.5)


def text_of(stats: m.ServerStats, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for part in tables.status(stats):
        console.print(part)
    return console.export_text()


def test_the_first_line_says_who_shares_and_whether_it_works() -> None:
    """What is wrong with an instance comes before all that is well."""
    pooled = msgspec.structs.replace(ONE, id="", name="")
    strange = msgspec.structs.replace(OTHER, namespace="11")
    lacking = msgspec.structs.replace(ONE, missing="rank 1")
    stopped = msgspec.structs.replace(ONE, stopped=4711)
    silent = msgspec.structs.replace(ONE, silent=25.0)
    orphan = msgspec.structs.replace(ONE, orphan=4242)
    mismatch = m.Mismatch("llama", "dtype", [], "")
    shared = "75.0% of the tokens looked up were found"
    three = [ONE, strange, pooled]
    good = {
        "no instance is connected": [],
        f"instance abababab at :8000 is the only one connected; {shared}": [ONE],
        f"2 instances share in place; {shared}": [ONE, OTHER],
        f"3 instances share: 2 in place, 1 through the pool; {shared}": [ONE, OTHER, pooled],
        f"2 instances, all of different models; {shared}": [ONE, strange],
        f"2 instances share: 1 in place, 1 through the pool; 1 of another model; {shared}": three,
    }
    bad = {
        "instance abababab at :8000 lacks rank 1; and 1 more": [lacking, OTHER],
        "is stopped (pid 4711): continue it, or kill it; and 1 more": [OTHER, stopped],
        "instance abababab at :8000 has been silent for 0 min 25 s": [silent, OTHER],
        "the process that started it (pid 4242) has ended; end pid 4194303": [orphan, OTHER],
        "instances of llama do not share: dtype differs": [ONE, OTHER],
    }
    for well, cases in ((True, good), (False, bad)):
        for said, instances in cases.items():
            mismatches = [] if well else [mismatch]
            stats = msgspec.structs.replace(STATS, instances=instances, mismatches=mismatches)
            found, line = status.verdict(stats)
            assert (found, said in line) == (well, True), line
            assert text_of(stats).splitlines()[0].strip() == line
    bare = msgspec.structs.replace(STATS, instances=[pooled, OTHER], segments=[])
    said = "the instance of pid 4194303 shares through the pool, to which nobody lends memory"
    assert status.verdict(bare) == (False, said)
    why = "GPU-3c1f lends nothing to the pool: set gpu_memory_utilization to 0.84 or less"
    told = msgspec.structs.replace(bare, reports=[m.Reported(0.0, "error", 7, "GPU-3c1f", why)])
    assert status.verdict(told) == (False, f"{said}: {why}")


def test_there_is_no_hit_rate_before_the_first_hit() -> None:
    """Nor is an instance at fault whose workers show their KV caches with the first request, and
    nobody is told to lend memory before an instance is connected."""
    early = msgspec.structs.replace(ONE, missing="rank 0", early=True)
    for hits, said in (({}, "nothing was looked up yet"), ({"11": (768, 0)}, "no hit yet")):
        stats = msgspec.structs.replace(STATS, instances=[early, OTHER], hits=hits)
        shown = text_of(stats)
        assert "waits for its first request" in shown
        assert f"2 instances share in place; {said}" in shown
        assert "0.0%" not in shown
    loaded = msgspec.structs.replace(stats, counters=COUNTERS | {"loaded_tokens": 512})
    assert "2 instances share in place; hits begin to come" in text_of(loaded)
    none = text_of(msgspec.structs.replace(STATS, instances=[], segments=[]))
    assert "segment" not in none


def test_an_arrow_leads_from_owner_to_reader_and_the_most_tokens_come_first() -> None:
    """The workers of a reader have each read a part of the same tokens."""
    one, other = ONE.id, OTHER.id
    pooled = msgspec.structs.replace(ONE, id="", name=":8002", pid=5)
    reads = [
        m.ReadStats(*row)
        for row in (
            (1, UUID, other, 5 << 20, 0, 512, one),
            (3, UUID, other, 4 << 20, 0, 512, one),
            (2, UUID, other, 0, 3, 0, other),
            (9, UUID, "ef" * 16, 1 << 30, 0, 20480),
            (5, UUID, "pool", 1 << 20, 0, 256),
        )
    ]
    stats = msgspec.structs.replace(STATS, instances=[ONE, OTHER, pooled], reads=reads)
    _, _, said = text_of(stats).partition("Who read from whom")
    assert [line.rstrip() for line in said.splitlines()[2:6]] == [
        "efefefef, ended  ─ 20,480 ─▶  pid 9",
        ":8001            ── 512 ───▶  :8000",
        "the pool         ── 256 ───▶  :8002",
        "Segments",
    ]
    assert "Who read" not in text_of(STATS)


def test_slots_in_quarantine_are_shown_with_the_pid_of_their_writer() -> None:
    stats = msgspec.structs.replace(STATS, quarantined_slots={4711: 3, 4712: 1})
    _, _, said = text_of(stats).partition("\nSlots in quarantine ")
    assert [line.split()[:2] for line in said.splitlines()[2:4]] == [["4711", "3"], ["4712", "1"]]
    assert status.summary(stats)["quarantined_slots"] == {4711: 3, 4712: 1}
    made = {one.name: one.samples for one in monitor.ServerMetrics(lambda: stats).collect()}
    assert [one.value for one in made["vcache_server_quarantined_slots"]] == [4]


def test_what_was_saved_is_on_the_first_screen_of_80_by_24() -> None:
    counters = COUNTERS | {"loaded_tokens": 1_234_567_890}
    busy = msgspec.structs.replace(
        STATS, instances=[ONE, OTHER] * 4, counters=counters, minute=(90, 123_456)
    )
    _, saved, rate, *_ = screen = text_of(busy, 80).splitlines()
    assert saved == "tokens not computed in the last minute 123,456   since the start 1,234,567,890"
    assert rate.startswith("requests/s with a hit 1.5   up 1 d 2 h")
    assert len(screen) <= 24
    young = msgspec.structs.replace(busy, uptime_seconds=30.0)
    assert status.saved(young)["requests/s with a hit"] == "3.0"


def test_a_terminal_is_told_that_the_server_is_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vcache_backend", "status", "--socket"]
    with stage(tmp_path) as here:
        server, path = here.server(), str(here.path)
        screen, terminal = pty.openpty()
        with server.stopped():
            done = ran(*command, path)
            assert (done.returncode, "waiting" in done.stderr) == (1, False)
            asking = subprocess.Popen([*command, path], stderr=terminal, cwd=ROOT)
            os.close(terminal)
            said = os.read(screen, 1 << 16).decode()
        assert (asking.wait(), said.strip()) == (0, f"waiting for the server at {path}")
        os.close(screen)


def test_commands_work_without_stderr(tmp_path: Path) -> None:
    """As behind `2>&-`."""
    with stage(tmp_path) as here:
        here.server()
        command = f"{sys.executable} -m vcache_backend status --socket {here.path} 2>&-"
        done = ran("sh", "-c", command)
        assert (done.returncode, "no instance is connected" in done.stdout) == (0, True)


def test_top_goes_on_over_a_restart_and_gives_the_terminal_back(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vcache_backend", "top", "--socket"]
    with stage(tmp_path) as here:
        server, path = here.server(), str(here.path)
        done = ran(*command, path)
        assert (done.returncode, "needs a terminal" in done.stderr) == (1, True)
        screen, terminal = pty.openpty()
        given = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
        top = subprocess.Popen([*command, path], stdout=terminal, cwd=ROOT, env=given)
        os.close(terminal)

        def until(text: bytes) -> bytes:
            """What the screen gets up to this text; OSError if `top` ends before."""
            said = b""
            while text not in said:
                said += os.read(screen, 1 << 16)
            return said

        try:
            until(b"no instance is connected")
            server.kill()
            until(b"no metadata server at")
            here.server()
            until(b"no instance is connected")
            top.send_signal(signal.SIGINT)
            until(b"\x1b[?1049l")
            assert top.wait() == 0
        finally:
            top.kill()
            top.wait()
            os.close(screen)
