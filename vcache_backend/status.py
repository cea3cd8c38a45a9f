"""Makes the tables and the JSON of `vcache status` from a server's statistics."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from vcache_backend.config import ByteSize
from vcache_backend.metadata_server.messages import (
    InstanceStats,
    Reported,
    SegmentInfo,
    ServerStats,
    StillMapped,
)

BAR_WIDTH = 24
READABLE = 32
"""Terminal columns that a text of several lines gets before other columns are left out."""
SHOWN_REPORTS = 5
SILENT_SECONDS = 10.0
"""An instance that is silent for so long does not answer: heartbeats come every second."""
ABSENT = (
    "absent: lost when the server was restarted, unless a worker still maps it and offers "
    "it again; `vcache segment add` lends anew"
)
_EIGHTHS = " ▏▎▍▌▋▊▉"
_UUID = re.compile(r"\b(GPU-[0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
"""A GPU's UUID. Tables show its start."""
_STYLES = {"ok": "green", "warn": "yellow", "error": "bold red", "fail": "bold red"}


def plain(value: Any) -> Any:
    """Convert `value` for JSON, with structs as dicts. (msgspec makes the wire's arrays of
    them.)
    """
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def summary(stats: ServerStats) -> dict[str, Any]:
    """`stats` as plain values, with the `verdict`, whether it is `ok`, and the `hit_rate`."""
    good, said = verdict(stats)
    return {**plain(stats), "verdict": said, "ok": good, "hit_rate": hit_rate(stats)}


def lately(stats: ServerStats, since: float) -> ServerStats:
    """`stats` without the reports before `since`, in seconds since the epoch."""
    return msgspec.structs.replace(
        stats, reports=[one for one in stats.reports if one.time >= since]
    )


def tokens(stats: ServerStats) -> tuple[int, int]:
    """Prompt tokens that instances asked for since the server's start, and those found."""
    return sum(asked for asked, _ in stats.hits.values()), sum(
        found for _, found in stats.hits.values()
    )


def hit_rate(stats: ServerStats) -> float | None:
    """Tokens found over tokens asked for; None before the first look-up."""
    asked, found = tokens(stats)
    return found / asked if asked else None


def verdict(stats: ServerStats) -> tuple[bool, str]:
    """Whether sharing works, and who shares, in one line. What is wrong comes first."""
    instances = stats.instances
    wrong = [f"{_named(one)} {trouble(one)}" for one in instances if trouble(one)]
    if all(one.state != "live" for one in stats.segments):
        wrong += [
            f"{_named(one)} shares through the pool, to which nobody lends memory"
            for one in instances
            if not one.id
        ]
    wrong += [
        f"instances of {one.model} do not share: {one.field} differs" for one in stats.mismatches
    ]
    if wrong:
        more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return False, f"{wrong[0]}{more}"
    if not instances:
        return True, "no instance is connected"
    if len(instances) == 1:
        return True, f"{_named(instances[0])} is alone: nobody to share with"
    of = Counter(one.namespace for one in instances)
    together = [one for one in instances if of[one.namespace] > 1]
    if not together:
        return True, f"{len(instances)} instances, all of different models: nobody to share with"
    ways = Counter("in place" if one.id else "through the pool" for one in together)
    said = f"{len(together)} instances share"
    said += (
        f" {next(iter(ways))}"
        if len(ways) == 1
        else ": " + ", ".join(f"{count} {way}" for way, count in ways.items())
    )
    if others := len(instances) - len(together):
        said += f"; {others} of another model"
    rate = hit_rate(stats)
    hits = (
        "nothing was looked up yet"
        if rate is None
        else f"{rate:.1%} of the tokens looked up were found"
    )
    return True, f"{said}; {hits}"


def trouble(one: InstanceStats) -> str:
    """What is wrong with an instance; empty if nothing is."""
    if one.stopped:
        return f"is stopped (pid {one.stopped}): continue it, or kill it"
    if one.silent > SILENT_SECONDS:
        return f"has been silent for {duration(one.silent)}"
    return f"lacks {one.missing}" if one.missing else ""


def _named(one: InstanceStats) -> str:
    """An instance in a sentence, such as `instance abababab at :8000`."""
    who = f"instance {one.id[:8]}" if one.id else f"the instance of pid {one.pid or '–'}"
    return f"{who} at {one.name}" if one.name else who


def bar(fraction: float) -> Text:
    """A bar of `BAR_WIDTH` cells. It never turns red: a full cache is a good one."""
    eighths = round(max(0.0, min(1.0, fraction)) * BAR_WIDTH * 8)
    full, rest = divmod(eighths, 8)
    cells = "█" * full + (_EIGHTHS[rest] if rest else "")
    return Text(cells.ljust(BAR_WIDTH, "·"), style="cyan")


def level(name: str) -> Text:
    """A level or status in its colour."""
    return Text(name, _STYLES.get(name, ""))


class _Fitted(Table):
    """A table that leaves out `spare` columns, the last one first, until the others fit the
    terminal.
    """

    spare: list[Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = copy(self)
        for column in reversed(self.spare):
            if sum(map(_needed, shown.columns)) <= options.max_width:
                break
            shown.columns = [one for one in shown.columns if one is not column]
        yield from Table.__rich_console__(shown, console, options)


def _needed(column: Column) -> int:
    """Terminal columns that `column` needs: at most `READABLE` if its text may be wrapped."""
    widest = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
    return 2 + (widest if column.no_wrap else min(widest, READABLE))


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A table without rules. Cells are plain text, never markup. Marks before a column's name: `>`
    right-justified, `~` may be wrapped, `-` is left out if the terminal is too narrow."""
    made = _Fitted(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for name in columns:
        marks = name[: len(name) - len(name.lstrip("-~>"))]
        made.add_column(
            name.lstrip("-~>"),
            no_wrap="~" not in marks,
            overflow="fold",
            justify="right" if ">" in marks else "left",
        )
    made.spare = [
        column for column, name in zip(made.columns, columns, strict=True) if name.startswith("-")
    ]
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def render(
    stats: ServerStats,
    before: ServerStats | None = None,
    seconds: float = 0.0,
    reports: int | None = SHOWN_REPORTS,
    everything: bool = False,
) -> RenderableType:
    """The output of `vcache status`: the verdict, what is wrong, who shares, and the pool. reports:
    how many to show; None for all. everything: counters, latencies and reads, too. before: the
    statistics of `seconds` ago, for the counters' change a second."""
    good, said = verdict(stats)
    first = Text(
        said,
        style="bold green"
        if good and len(stats.instances) > 1
        else "bold"
        if good
        else "bold yellow",
    )
    latencies = [
        (name, f"{latency.count:,}", f"{latency.p50_us:,.1f}", f"{latency.p99_us:,.1f}")
        for name, latency in sorted(stats.latency.items())
        if latency.count
    ]
    quarantine = [
        (str(pid), f"{slots:,}") for pid, slots in sorted(stats.quarantined_slots.items())
    ]
    wrong = [
        _still_mapped(stats.still_mapped),
        table(
            "Not shared",
            ("~model", "~field", "~value", "~instances", "~what to do"),
            _mismatches(stats),
        ),
        table(
            "Slots in quarantine until their writer ends or answers", ("pid", "slots"), quarantine
        ),
        _reports(stats.reports, len(stats.reports) if reports is None else reports),
    ]
    details = [
        in_place_table(stats.instances),
        _reads(stats),
        _counters(
            stats,
            before if before is not None and seconds and before.epoch == stats.epoch else None,
            seconds,
        ),
        table("Time inside the server", ("request", ">count", ">p50 µs", ">p99 µs"), latencies),
        table("Namespaces", ("namespace", "~what it is"), sorted(stats.namespaces.items())),
    ]
    wrong, details = ([shown for shown in some if shown.row_count] for some in (wrong, details))
    instances = [instances_table(stats.instances)] if stats.instances else []
    pool = [] if stats.instances and not stats.segments else [segments_table(stats.segments)]
    more = (
        details
        if everything
        else [
            Text("vcache status --all shows counters, latencies and who has read what", style="dim")
        ]
    )
    return Group(first, _headline(stats), *wrong, *instances, *pool, *_hits(stats), *more)


def segments_table(segments: Sequence[SegmentInfo]) -> RenderableType:
    """One row for each segment, or a sentence if there is none."""
    if not segments:
        return Text(
            "no segments: start a worker, or lend memory with `vcache segment add`", style="yellow"
        )
    rows: list[tuple[str | Text, ...]] = []
    for info in segments:
        fraction = info.used / info.nbytes
        counts = (
            f"{count:,}" for count in (info.chunks, info.leased, info.reserved, info.evictions)
        )
        state = Text(info.state, style="" if info.state == "live" else "yellow")
        name = info.device[:12] if info.medium == "cuda" else info.device
        rows.append(
            (
                info.id,
                name,
                bar(fraction),
                f"{fraction:4.0%}",
                size(info.used),
                size(info.nbytes),
                *counts,
                state,
            )
        )
    columns = (
        "~segment",
        "~device",
        "-occupancy",
        "",
        ">used",
        ">size",
        ">chunks",
        "->leased",
        "->reserved",
        "->evicted",
        "-state" if all(info.state == "live" for info in segments) else "state",
    )
    made = table("Segments", columns, rows)
    if all(info.state != "absent" for info in segments):
        return made
    return Group(made, Text(ABSENT, style="yellow"))


def instances_table(instances: Sequence[InstanceStats]) -> Table:
    """One row for each instance."""
    rows = []
    for one in instances:
        wrong = trouble(one)
        state = (
            Text(wrong, style="yellow")
            if wrong
            else Text("shares in place" if one.id else "shares through the pool")
        )
        who = (one.id[:8] or "–", str(one.pid or "–"), one.name or "–", one.device[:12])
        rows.append((*who, f"{one.silent:.1f} s", state))
    return table(
        "Instances", ("instance", ">pid", "~port", "-device", ">last heard", "~state"), rows
    )


def in_place_table(instances: Sequence[InstanceStats]) -> Table:
    """One row for each instance that shares in place."""
    rows = [
        (
            one.id[:8],
            one.device[:12],
            str(one.ranks),
            str(one.regions),
            f"{one.blocks:,}",
            f"{one.resident:,}",
        )
        for one in instances
        if one.id
    ]
    return table(
        "KV caches shared in place",
        ("instance", "device", ">ranks", ">regions", ">blocks", ">resident"),
        rows,
    )


def _still_mapped(readers: Sequence[StillMapped]) -> Table:
    """One row for each process that still maps the KV cache of an ended instance."""
    rows = []
    for one in readers:
        what = Text(
            "stopped: continue it, or kill it" if one.stopped else "is unmapping it", style="yellow"
        )
        rows.append((one.instance[:8], one.device[:12], str(one.pid or "–"), what))
    columns = ("instance", "device", ">read by", "~state of that process")
    return table("KV caches of instances that have ended, still mapped", columns, rows)


def _reads(stats: ServerStats) -> Table:
    """One row for each reader and owner, the reader of the most bytes first."""
    known = {
        one.id: (one.id[:8], str(one.pid or "–"), one.name or "–")
        for one in stats.instances
        if one.id
    }
    rows, totals = [], Counter[int]()
    for one in stats.reads:
        totals[one.pid] += one.nbytes
    for one in sorted(stats.reads, key=lambda one: (-totals[one.pid], one.pid, -one.nbytes)):
        reader = known.get(one.reader, (one.reader[:8] or "–", str(one.pid or "–"), "–"))
        owner = known.get(one.instance, (one.instance[:8], "ended", "–"))
        rows.append((*reader, *owner, size(one.nbytes), f"{one.refused:,}"))
    columns = ("reader", ">pid", "~port", "owner", ">pid", "~port", ">read", ">refused")
    return table("Read in place, by reader and owner", columns, rows)


def size(nbytes: int) -> str:
    """`nbytes` for people, such as `1.5 GiB`."""
    return ByteSize(nbytes).about


def duration(seconds: float) -> str:
    """`seconds` in its two largest units, such as `2 h 5 min`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _headline(stats: ServerStats) -> Text:
    """Two lines that fit 80 columns."""
    text = Text.assemble(("up ", "dim"), duration(stats.uptime_seconds))
    text.append("   clients ", "dim").append(f"{stats.clients:,}").append(
        "   memory ", "dim"
    ).append(size(stats.rss_bytes))
    for start, name in (
        ("\n", "chunks"),
        ("   ", "leases"),
        ("   ", "reservations"),
        ("   ", "quarantined"),
    ):
        text.append(f"{start}{name} ", "dim").append(f"{getattr(stats, name):,}")
    return text


def _hits(stats: ServerStats) -> Iterator[Text]:
    """The hit rate; nothing before the first look-up."""
    rate, (asked, found) = hit_rate(stats), tokens(stats)
    if rate is not None:
        yield Text.assemble(
            ("hits ", "dim"),
            bar(rate),
            f" {rate:.1%}",
            (f"   {found:,} of {asked:,} tokens looked up", "dim"),
        )


def _counters(stats: ServerStats, before: ServerStats | None, seconds: float) -> Table:
    rows = []
    for name, total in ((name, total) for name, total in stats.counters.items() if total):
        row = [name.replace("_", " "), f"{total:,}"]
        if before is not None:
            row.append(f"{(total - before.counters.get(name, 0)) / seconds:,.0f}")
        rows.append(row)
    return table("Counters", ("counter", ">total", ">a second")[: 2 if before is None else 3], rows)


def _reports(reports: Sequence[Reported], most: int) -> Table:
    """The newest `most` reports, newest first."""
    rows = [
        (
            time.strftime("%m-%d %H:%M:%S", time.localtime(one.time)),
            level(one.level),
            str(one.pid),
            one.device[:12],
            one.text,
        )
        for one in reversed(reports[-most:])
    ]
    title = (
        "Reports"
        if len(reports) <= most
        else f"Reports, the newest {most} of {len(reports)} (--json has all)"
    )
    return table(title, ("when", "", "pid", "-device", "~report"), rows)


def _mismatches(stats: ServerStats) -> Iterator[tuple[str, ...]]:
    """One row for each value of each field in which instances of one model differ."""
    for mismatch in stats.mismatches:
        advice = mismatch.advice or f"make {mismatch.field} the same everywhere"
        for number, (value, who) in enumerate(mismatch.values):
            first = (mismatch.model, mismatch.field, advice) if not number else ("", "", "")
            yield *first[:2], value or "–", _UUID.sub(r"\1", ", ".join(who)), first[2]
