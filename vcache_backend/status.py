"""What `vcache` shows about a server: values in, tables out. No socket, no clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vcache_backend.config import ByteSize
from vcache_backend.metadata_server.messages import Reported, SegmentInfo, ServerStats

BAR_WIDTH = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FOLDED = ("what it is", "report", "value", "instances", "what to do")
"""Columns whose text may take several lines."""


def plain(value: Any) -> Any:
    """`value` with every struct as a dict of its fields: the JSON for people's scripts (the wire's structs are arrays)."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def summary(stats: ServerStats) -> dict[str, Any]:
    """`stats` as plain values, with the rates that follow from the counters (None before the first request)."""
    return {**plain(stats), "hit_rates": {kind: hit_rate(stats, kind) for kind in ("lookup", "acquire")}}


def hit_rate(stats: ServerStats, kind: str) -> float | None:
    """Chunks found over chunks asked for, of `lookup` or `acquire`; None before the first."""
    asked = stats.counters.get(f"{kind}_chunks", 0)
    return stats.counters.get(f"{kind}_hits", 0) / asked if asked else None


def bar(fraction: float, width: int = BAR_WIDTH) -> Text:
    """A bar of `width` cells, exact to an eighth of a cell. One colour: full is what a cache should be."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    cells = "█" * full + (_EIGHTHS[rest] if rest else "")
    return Text(cells.ljust(width, "·"), style="cyan")


def render(stats: ServerStats, before: ServerStats | None = None, seconds: float = 0.0) -> RenderableType:
    """The whole picture. With the stats of `seconds` ago, counters get a column of what happened since, a second."""
    parts: list[RenderableType] = [_headline(stats), segments_table(stats.segments), _hits(stats)]
    parts.append(_counters(stats, before if before is not None and before.epoch == stats.epoch else None, seconds))
    if any(latency.count for latency in stats.latency.values()):
        parts.append(_latencies(stats))
    if stats.namespaces:
        parts.append(_namespaces(stats))
    if stats.quarantined_slots:
        parts.append(_quarantine(stats))
    if stats.mismatches:
        parts.append(_mismatches(stats))
    if stats.reports:
        parts.append(_reports(stats.reports))
    return Group(*parts)


def segments_table(segments: Sequence[SegmentInfo]) -> RenderableType:
    """One row a segment; a sentence when there is none."""
    if not segments:
        return Text("no segments: start a worker, or lend memory with `vcache segment add`", style="yellow")
    columns = ("segment", "device", "occupancy", "", "used", "size", "chunks", "leased", "reserved", "evicted", "state")
    table = _table("Segments", *columns)
    for column in table.columns[4:10]:
        column.justify = "right"
    for info in segments:
        fraction = info.used / info.nbytes if info.nbytes else 0.0
        counts = (f"{count:,}" for count in (info.chunks, info.leased, info.reserved, info.evictions))
        state = Text(info.state, style="" if info.state == "live" else "yellow")
        sizes = (size(info.used), size(info.nbytes))
        table.add_row(Text(info.id), Text(info.device), bar(fraction), f"{fraction:4.0%}", *sizes, *counts, state)
    return table


def size(nbytes: int) -> str:
    return ByteSize(nbytes).about


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _headline(stats: ServerStats) -> Text:
    text = Text.assemble(("up ", "dim"), duration(stats.uptime_seconds))
    model_spec = {
        "clients": stats.clients,
        "chunks": stats.chunks,
        "leases": stats.leases,
        "reservations": stats.reservations,
        "quarantined": stats.quarantined,
    }
    for name, number in model_spec.items():
        text.append(f"   {name} ", "dim").append(f"{number:,}")
    return text.append("   memory ", "dim").append(size(stats.rss_bytes))


def _hits(stats: ServerStats) -> RenderableType:
    table = _table("Hits", "request", "rate", "", "found", "asked")
    for kind in ("lookup", "acquire"):
        rate = hit_rate(stats, kind)
        found, asked = (stats.counters.get(f"{kind}_{what}", 0) for what in ("hits", "chunks"))
        table.add_row(kind, bar(rate or 0.0), "–" if rate is None else f"{rate:.1%}", f"{found:,}", f"{asked:,}")
    return table


def _counters(stats: ServerStats, before: ServerStats | None, seconds: float) -> RenderableType:
    table = _table("Counters", "counter", "total")
    table.columns[1].justify = "right"
    live = before is not None and seconds > 0
    if live:
        table.add_column("a second", justify="right")
    for name, total in stats.counters.items():
        row = [name.replace("_", " "), f"{total:,}"]
        if before is not None and live:
            row.append(f"{(total - before.counters.get(name, 0)) / seconds:,.0f}")
        table.add_row(*row, style="" if total else "dim")
    return table


def _latencies(stats: ServerStats) -> RenderableType:
    table = _table("Time inside the server", "request", "count", "p50 µs", "p99 µs")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, latency in sorted(stats.latency.items()):
        if latency.count:
            table.add_row(name, f"{latency.count:,}", f"{latency.p50_us:,.1f}", f"{latency.p99_us:,.1f}")
    return table


def _namespaces(stats: ServerStats) -> RenderableType:
    table = _table("Namespaces", "namespace", "what it is")
    for name, what in sorted(stats.namespaces.items()):
        table.add_row(Text(name), Text(what))
    return table


def _mismatches(stats: ServerStats) -> RenderableType:
    """Who does not share, and why: a row for each value of each field that instances of one model differ in."""
    table = _table("Not shared", "model", "field", "value", "instances", "what to do")
    for mismatch in stats.mismatches:
        advice = mismatch.advice or f"make {mismatch.field} the same everywhere"
        for number, (value, who) in enumerate(mismatch.values):
            first = (mismatch.model, mismatch.field) if not number else ("", "")
            cells = (*first, value, ", ".join(who), advice if not number else "")
            table.add_row(*map(Text, cells))
    return table


def _quarantine(stats: ServerStats) -> RenderableType:
    table = _table("Slots in quarantine until their writer ends or answers", "pid", "slots")
    for pid, slots in sorted(stats.quarantined_slots.items()):
        table.add_row(str(pid), f"{slots:,}", style="yellow")
    return table


def _reports(reports: Sequence[Reported]) -> RenderableType:
    """What instances reported, newest first."""
    table = _table("Reports", "when", "", "pid", "device", "report")
    style = {"warn": "yellow", "error": "bold red"}
    for reported in reversed(reports):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reported.time))
        level = Text(reported.level, style.get(reported.level, ""))
        table.add_row(when, level, str(reported.pid), Text(reported.device), Text(reported.text))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column not in _FOLDED)
    return table
