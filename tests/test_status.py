"""What `vcache status` shows: the picture of a server's statistics, and the summary that programs
read.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import msgspec
from rich.console import Console

from vcache_backend import status
from vcache_backend.metadata_server.messages import (
    InstanceStats,
    Latency,
    Mismatch,
    ReadStats,
    Reported,
    SegmentId,
    SegmentInfo,
    ServerStats,
    StillMapped,
)

SEGMENT = SegmentInfo(
    id=SegmentId("0123456789ab"),
    device="GPU-3c1f",
    medium="cuda",
    nbytes=8 << 30,
    used=6 << 30,
    chunks=1536,
    leased=3,
    reserved=2,
    evictions=7,
)
STATS = ServerStats(
    epoch=5,
    uptime_seconds=93784,
    clients=3,
    chunks=1536,
    leases=1,
    reservations=1,
    quarantined=0,
    counters={"lookup_chunks": 200, "lookup_hits": 150, "evicted": 7},
    latency={"lookup": Latency(40, 12.5, 80.25), "clear": Latency(0, 0, 0)},
    segments=[SEGMENT],
    namespaces={"00ff00ff00ff00ff": "llama bf16"},
    rss_bytes=50 << 20,
    hits={"00ff00ff00ff00ff": (1600, 1280), "11": (400, 220)},
)
UUID = "GPU-3c1f5a3e-1111-2222-3333-444444444444"
ONE = InstanceStats("ab" * 16, UUID, 4_194_303, 2_097_152, 131_072, 34, name=":8000", silent=0.4)
OTHER = InstanceStats("cd" * 16, UUID, 4_194_304, 2_097_152, 131_072, 34, name=":8001", silent=0.5)


def text_of(renderable: Any, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


def test_status_shows_segments_hits_and_with_all_counters_and_latencies() -> None:
    text = text_of(status.render(STATS, everything=True))
    for part in (
        "1 d 2 h",
        "0123456789ab",
        "GPU-3c1f",
        "75%",
        "6 GiB",
        "8 GiB",
        "1,536",
        "75.0%",
        "12.5",
        "80.2",
        "llama bf16",
        "50 MiB",
    ):
        assert part in text
    assert "clear" not in text
    assert "12.5" not in text_of(status.render(STATS))


def test_the_first_line_says_who_shares_and_whether_it_works() -> None:
    """What is wrong with an instance comes before all that is well."""
    pooled = msgspec.structs.replace(ONE, id="", name="")
    strange = msgspec.structs.replace(OTHER, namespace="11")
    lacking = msgspec.structs.replace(ONE, missing="rank 1")
    stopped = msgspec.structs.replace(ONE, stopped=4711)
    silent = msgspec.structs.replace(ONE, silent=25.0)
    mismatch = Mismatch("llama", "dtype", [], "")
    for instances, mismatches, good, said in (
        ([], [], True, "no instance is connected"),
        ([ONE], [], True, "instance abababab at :8000 is alone: nobody to share with"),
        (
            [ONE, OTHER],
            [],
            True,
            "2 instances share in place; 75.0% of the tokens looked up were found",
        ),
        (
            [ONE, OTHER, pooled],
            [],
            True,
            "3 instances share: 2 in place, 1 through the pool; 75.0% of",
        ),
        ([ONE, strange], [], True, "2 instances, all of different models: nobody to share with"),
        (
            [ONE, strange, pooled],
            [],
            True,
            "2 instances share: 1 in place, 1 through the pool; 1 of another model; 75.0% of",
        ),
        ([lacking, OTHER], [], False, "instance abababab at :8000 lacks rank 1"),
        (
            [OTHER, stopped],
            [mismatch],
            False,
            "is stopped (pid 4711): continue it, or kill it; and 1 more",
        ),
        ([silent, OTHER], [], False, "instance abababab at :8000 has been silent for 0 min 25 s"),
        ([ONE, OTHER], [mismatch], False, "instances of llama do not share: dtype differs"),
    ):
        stats = msgspec.structs.replace(STATS, instances=instances, mismatches=mismatches)
        found, line = status.verdict(stats)
        assert (found, said in line) == (good, True), line
        assert text_of(status.render(stats)).splitlines()[0].strip() == line
    bare = msgspec.structs.replace(STATS, instances=[pooled, OTHER], segments=[])
    assert status.verdict(bare) == (
        False,
        "the instance of pid 4194303 shares through the pool, to which nobody lends memory",
    )


def test_status_shows_what_happened_since_the_last_look_and_whose_slots_wait() -> None:
    later = status.plain(STATS)["counters"] | {"evicted": 27}
    now = msgspec.structs.replace(STATS, counters=later, quarantined_slots={4711: 1024})
    assert "a second" not in text_of(status.render(now, everything=True)) + text_of(
        status.render(now, msgspec.structs.replace(STATS, epoch=6), 2.0, everything=True)
    )
    rows = [
        line.split()
        for line in text_of(status.render(now, STATS, 2.0, everything=True)).splitlines()
    ]
    assert ["evicted", "27", "10"] in rows
    assert ["4711", "1,024"] in rows
    assert "vcache segment add" in text_of(status.segments_table([]))
    gone = text_of(
        status.segments_table([SEGMENT, msgspec.structs.replace(SEGMENT, state="absent")]), 80
    )
    assert gone.count("absent") == 2
    assert "vcache segment add" in " ".join(gone.split())


def test_eighty_columns_cut_no_cell_and_show_what_is_wrong_first() -> None:
    """Columns are left out instead, and reports are few."""
    uuid, told = (
        "GPU-3c1f5a3e-1111-2222-3333-444444444444",
        "its first words, and how it went on, and what to do about all that",
    )
    segments = [
        msgspec.structs.replace(
            SEGMENT, device=uuid, nbytes=1023 << 20, used=1007 << 20, chunks=131_072
        ),
        SEGMENT,
    ]
    reports = [
        Reported(1e9 + number, "error", 4_194_303, uuid, f"report {number}: {told}")
        for number in range(12)
    ]
    stats = msgspec.structs.replace(
        STATS, segments=segments, reports=reports, counters={"evicted": 7, "clients": 0}
    )
    lines = text_of(status.render(stats, everything=True), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    shown = " ".join(line.strip() for line in lines)
    assert ["0123456789ab", "GPU-3c1f5a3e", "98%", "1007", "MiB", "1023", "MiB", "131,072"] in [
        line.split()[:8] for line in lines
    ]
    assert shown.index("Reports") < shown.index("Segments") < shown.index("Counters")
    assert [f"report {number}:" in shown for number in (11, 7, 6)] == [True, True, False]
    lately = text_of(status.render(status.lately(stats, 1e9 + 3), reports=None))
    assert [f"report {number}:" in lately for number in (11, 3, 2)] == [True, True, False]
    assert "clients " not in shown.partition("Counters")[2]


def test_names_as_long_as_there_may_be_go_on_in_the_next_line_and_no_number_is_cut() -> None:
    long = {"id": SegmentId("x" * 64), "device": "host:" + "y" * 60, "medium": "host"}
    full = msgspec.structs.replace(
        SEGMENT, **long, nbytes=1023 << 20, used=1007 << 20, chunks=131_072
    )
    _, header, *lines = text_of(status.segments_table([full, SEGMENT]), 80).splitlines()
    assert max(map(len, (header, *lines))) <= 80
    assert [header.split()[at] for at in (0, 1, -3, -2, -1)] == [
        "segment",
        "device",
        "used",
        "size",
        "chunks",
    ]
    assert lines[0].split()[2:] == ["98%", "1007", "MiB", "1023", "MiB", "131,072"]
    assert ["".join(lines).count(letter) for letter in "xy"] == [64, 60]
    assert lines[-1].split()[:2] == ["0123456789ab", "GPU-3c1f"]


def test_instances_that_share_in_place_fit_into_eighty_columns() -> None:
    """And the JSON has all of each."""
    lacking = InstanceStats("ef" * 16, UUID, 0, 0, 0, 272, 8, "its scheduler")
    stats = msgspec.structs.replace(STATS, instances=[ONE, lacking])
    alone = text_of(status.render(msgspec.structs.replace(stats, segments=[])))
    assert "vcache segment add" not in alone, "nobody needs a pool"
    lines = text_of(status.render(stats, everything=True), 80).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert [
        "abababab",
        "4194303",
        ":8000",
        "GPU-3c1f5a3e",
        "0.4",
        "s",
        "shares",
        "in",
        "place",
    ] in rows
    assert ["efefefef", "–", "–", "GPU-3c1f5a3e", "0.0", "s", "lacks", "its", "scheduler"] in rows
    assert ["abababab", "GPU-3c1f5a3e", "1", "34", "2,097,152", "131,072"] in rows
    assert ["efefefef", "GPU-3c1f5a3e", "8", "272", "0", "0"] in rows
    for stopped, what in ((True, "stopped: continue it, or kill it"), (False, "is unmapping it")):
        kept = msgspec.structs.replace(
            STATS, still_mapped=[StillMapped("ef" * 16, UUID, 4711, stopped)]
        )
        (row,) = [line for line in text_of(status.render(kept)).splitlines() if "efefefef" in line]
        assert " ".join(row.split()) == f"efefefef GPU-3c1f5a3e 4711 {what}"
    assert len(row.rstrip()) <= 80
    reads = [
        ReadStats(7, UUID, "ab" * 16, 1 << 40, 1_000_000, "cd" * 16),
        ReadStats(8, UUID, "ef" * 16, 1, 0),
    ]
    shown = text_of(
        status.render(
            msgspec.structs.replace(STATS, instances=[ONE, OTHER], reads=reads), everything=True
        ),
        80,
    )
    rows = [line.split() for line in shown.splitlines()]
    assert [
        "cdcdcdcd",
        "4194304",
        ":8001",
        "abababab",
        "4194303",
        ":8000",
        "1",
        "TiB",
        "1,000,000",
    ] in rows
    assert ["–", "8", "–", "efefefef", "ended", "–", "1", "B", "0"] in rows
    busy = [
        ReadStats(pid, UUID, "ab" * 16, nbytes, 0)
        for pid, nbytes in ((7, 5), (8, 4), (9, 1), (8, 3))
    ]
    text = text_of(status.render(msgspec.structs.replace(STATS, reads=busy), everything=True))
    assert re.findall(r"^– +(\d) .*?(\d) B", text, re.MULTILINE) == [
        ("8", "4"),
        ("8", "3"),
        ("7", "5"),
        ("9", "1"),
    ]
    assert status.summary(stats)["instances"][0] == status.plain(ONE)
    assert status.summary(stats)["instances"][0]["id"] == "ab" * 16


def test_who_does_not_share_is_shown_with_both_values_and_what_to_do() -> None:
    """A name that reads like markup is a name."""
    values = [("17", ["pid 1 on host"]), ("[/b]", ["pid 2 on host", "pid 3 on host"])]
    mismatch = Mismatch(
        "llama", "extra.hash_probe", values, "start all with the same PYTHONHASHSEED"
    )
    stats = msgspec.structs.replace(STATS, mismatches=[mismatch], namespaces={"aa": "[/red]"})
    text = text_of(status.render(stats, everything=True), 200)
    for part in (
        "Not shared",
        "extra.hash_probe",
        "17",
        "[/b]",
        "pid 2 on host, pid 3 on host",
        "same PYTHONHASHSEED",
        "[/red]",
    ):
        assert part in text
    assert status.summary(stats)["mismatches"][0]["advice"] == mismatch.advice
    assert "Not shared" not in text_of(status.render(STATS))


def test_eighty_columns_say_who_does_not_share_whatever_the_model_s_path() -> None:
    path, who = "/models/" + "x" * 100, "GPU-3c1f5a3e-1111-2222-3333-444444444444"
    values = [("", [f"pid 4711 on {who}"]), ("7", [f"pid 4712 on {who}", f"pid 4713 on {who}"])]
    mismatch = Mismatch(path, "extra.hash_root", values, "start all with the same PYTHONHASHSEED")
    lines = text_of(
        status.render(msgspec.structs.replace(STATS, mismatches=[mismatch])), 80
    ).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert (lines[0].strip(), lines[1][:11]) == ("instances of", "/models/xxx")
    words = " ".join(lines).split()
    assert {
        "instances",
        "what",
        "extra.hash_root",
        "–",
        "4711",
        "4713",
        "GPU-3c1f5a3e",
        "PYTHONHASHSEED",
    } <= {*words}
    assert sum(word.count("x") for word in words if set(word) == {"x"}) >= 90


def test_the_summary_is_named_fields_and_rates() -> None:
    summary = json.loads(json.dumps(status.summary(STATS)))
    assert summary["segments"][0]["device"] == "GPU-3c1f"
    assert summary["latency"]["lookup"] == {
        "count": 40,
        "p50_us": 12.5,
        "p99_us": 80.25,
        "total_us": 0.0,
    }
    assert (summary["hit_rate"], summary["ok"], summary["verdict"]) == (
        0.75,
        True,
        "no instance is connected",
    )
