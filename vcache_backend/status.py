"""Makes the tables and the JSON of `vcache status` from a server's statistics."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from vcache_backend.config import ByteSize
from vcache_backend.protocol import messages as m

SHOWN_REPORTS = 5
SILENT_SECONDS = 10.0
"""After this silence an instance does not answer any more: heartbeats come every second."""
_UUID = re.compile(r"\b(GPU-[0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
"""A GPU's UUID. Tables show the beginning."""
_STYLES = {"ok": "green", "warn": "yellow", "error": "bold red", "fail": "bold red"}


def plain(value: Any) -> Any:
    """Convert `value` for JSON, with structs as dicts. (On the wire they are arrays.)"""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def summary(stats: m.ServerStats) -> dict[str, Any]:
    """`stats` as plain values, with the `verdict`, `ok`, and the `hit_rate`."""
    good, said = verdict(stats)
    return {**plain(stats), "verdict": said, "ok": good, "hit_rate": hit_rate(stats)}


def tokens(stats: m.ServerStats) -> tuple[int, int]:
    """Prompt tokens looked up since the server's start, and tokens found."""
    asked, found = zip((0, 0), *stats.hits.values(), strict=True)
    return sum(asked), sum(found)


def hit_rate(stats: m.ServerStats) -> float | None:
    """Tokens found over tokens asked for; None before the first look-up."""
    asked, found = tokens(stats)
    return found / asked if asked else None


def verdict(stats: m.ServerStats) -> tuple[bool, str]:
    """Say whether sharing works, and who shares, in one line. Faults come first."""
    wrong = _wrong(stats)
    if wrong:
        more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return False, f"{wrong[0]}{more}"
    return True, _sharing(stats)


def _wrong(stats: m.ServerStats) -> list[str]:
    """List the faults that keep instances from sharing."""
    instances = stats.instances
    wrong = [f"{_named(each)} {trouble(each)}" for each in instances if trouble(each)]
    if all(segment.state != "live" for segment in stats.segments):
        said = [each.text for each in stats.reports if "lends nothing to the pool: " in each.text]
        why = f": {said[-1]}" if said else ""
        wrong += [
            f"{_named(instance)} shares through the pool, to which nobody lends memory{why}"
            for instance in instances
            if not instance.id
        ]
    differ = stats.mismatches
    return wrong + [
        f"instances of {each.model} do not share: {each.field} differs" for each in differ
    ]


def _sharing(stats: m.ServerStats) -> str:
    """Say who shares, and the hit rate."""
    instances, found = stats.instances, _found(stats)
    if not instances:
        return "no instance is connected"
    if len(instances) == 1:
        return f"{_named(instances[0])} is the only one connected; {found}"
    namespaces = Counter(instance.namespace for instance in instances)
    together = [instance for instance in instances if namespaces[instance.namespace] > 1]
    if not together:
        return f"{len(instances)} instances, all of different models; {found}"
    ways = Counter("in place" if instance.id else "through the pool" for instance in together)
    counted = ", ".join(f"{count} {way}" for way, count in ways.items())
    how = f" {next(iter(ways))}" if len(ways) == 1 else f": {counted}"
    alone = len(instances) - len(together)
    others = f"; {alone} of another model" if alone else ""
    return f"{len(together)} instances share{how}{others}; {found}"


def _found(stats: m.ServerStats) -> str:
    """Say the hit rate, once there is one."""
    asked, found = tokens(stats)
    if not asked:
        return "nothing was looked up yet"
    if not found:
        return f"none of the {asked:,} tokens looked up were found yet"
    return f"{found / asked:.1%} of the tokens looked up were found"


def trouble(instance: m.InstanceStats) -> str:
    """Name the fault of an instance, or nothing."""
    if instance.stopped:
        return f"is stopped (pid {instance.stopped}): continue it, or kill it"
    if instance.silent > SILENT_SECONDS:
        return f"has been silent for {duration(instance.silent)}"
    if instance.orphan:
        started = f"the process that started it (pid {instance.orphan}) has ended"
        return f"is an orphan: {started}; end pid {instance.pid}"
    return f"lacks {instance.missing}" if instance.missing and not instance.early else ""


def state(instance: m.InstanceStats) -> str:
    """Name the fault of an instance, or how it shares."""
    way = "shares in place" if instance.id else "shares through the pool"
    return trouble(instance) or ("waits for its first request" if instance.missing else way)


def _named(instance: m.InstanceStats) -> str:
    """Name an instance in a sentence, such as `instance abababab at :8000`."""
    who = f"the instance of pid {instance.pid or '–'}"
    if instance.id:
        who = f"instance {instance.id[:8]}"
    return f"{who} at {instance.name}" if instance.name else who


def level(name: str) -> Text:
    return Text(name, _STYLES.get(name, ""))


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Make a table without rules. Cells are plain text, never markup. Marks before a column's name:
    `>` right-justified, `~` may be wrapped."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    made.box = None
    made.padding = (0, 2, 0, 0)
    for name in columns:
        wraps = name.startswith("~")
        justify: JustifyMethod = "right" if name.startswith(">") else "left"
        made.add_column(name.lstrip("~>"), no_wrap=not wraps, overflow="fold", justify=justify)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def render(stats: m.ServerStats) -> RenderableType:
    """Make the output of `vcache status`: the verdict, faults, instances, and the pool."""
    good, said = verdict(stats)
    style = "bold yellow" if not good else "bold green" if len(stats.instances) > 1 else "bold"
    shown = [
        _mismatches(stats),
        _quarantined(stats),
        _reports(stats.reports),
        instances_table(stats.instances),
    ]
    pool = [segments_table(stats.segments)] if stats.segments else []
    filled = [each for each in shown if each.row_count]
    counts = *_hits(stats), *_waits(stats)
    return Group(Text(said, style=style), _headline(stats), *filled, *pool, *counts)


def segments_table(segments: Sequence[m.SegmentInfo]) -> RenderableType:
    """Make a row for each segment, or a sentence without segments."""
    if not segments:
        return Text("no segments: no process lends memory to a pool; in place none is needed")
    rows = [
        (
            info.id,
            info.device[:12] if info.medium == "cuda" else info.device,
            f"{info.used / info.nbytes:.0%}",
            ByteSize(info.used).about,
            ByteSize(info.nbytes).about,
            f"{info.chunks:,}",
            Text(info.state, style="" if info.state == "live" else "yellow"),
        )
        for info in segments
    ]
    columns = ("~segment", "~device", ">full", ">used", ">size", ">chunks", "state")
    return table("Segments", columns, rows)


def instances_table(instances: Sequence[m.InstanceStats]) -> Table:
    rows = []
    for instance in instances:
        rows.append(
            (
                instance.id[:8] or "–",
                str(instance.pid or "–"),
                instance.name or "–",
                instance.device[:12],
                f"{instance.silent:.1f} s",
                Text(state(instance), style="yellow" if trouble(instance) else ""),
            )
        )
    return table(
        "Instances", ("instance", ">pid", "~port", "device", ">last heard", "~state"), rows
    )


def duration(seconds: float) -> str:
    """`seconds` in its two largest units, such as `2 h 5 min`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _headline(stats: m.ServerStats) -> Text:
    """Make two lines that fit 80 columns."""
    text = Text()
    for start, name, value in (
        ("", "up", duration(stats.uptime_seconds)),
        ("   ", "clients", f"{stats.clients:,}"),
        ("   ", "memory", ByteSize(stats.rss_bytes).about),
        ("\n", "chunks", f"{stats.chunks:,}"),
        ("   ", "reservations", f"{stats.reservations:,}"),
        ("   ", "quarantined", f"{stats.quarantined:,}"),
    ):
        text.append(f"{start}{name} ", "dim").append(value)
    return text


def _hits(stats: m.ServerStats) -> Iterator[Text]:
    """Show the hit rate; nothing before the first look-up."""
    asked, found = tokens(stats)
    if asked:
        counted = f"   {found:,} of {asked:,} tokens looked up"
        rate = f"{found / asked:.1%}" if found else "none yet"
        yield Text.assemble(("hits ", "dim"), rate, (counted, "dim"))


def _waits(stats: m.ServerStats) -> Iterator[Text]:
    """Show how requests waited for chunks of other instances; nothing before a promise."""
    counts = Counter(stats.counters)
    if counts["promised_chunks"]:
        promised, broken = counts["promised_chunks"], counts["promised_chunks_broken"]
        counted = f"   for {counts['awaited_tokens']:,} tokens"
        counted += f"   {promised:,} chunks promised, {broken:,} broken"
        waited = f"{counts['waited_milliseconds'] / 1e3:,.1f} s"
        yield Text.assemble(("waits ", "dim"), waited, (counted, "dim"))


def _reports(reports: Sequence[m.Reported]) -> Table:
    """Make a row for each of the newest reports, newest first."""
    rows = [
        (_when(report.time), level(report.level), str(report.pid), report.text)
        for report in reversed(reports[-SHOWN_REPORTS:])
    ]
    more = f", the newest {SHOWN_REPORTS} of {len(reports)} (--json has all)"
    title = "Reports" + (more if len(reports) > SHOWN_REPORTS else "")
    return table(title, ("when", "", "pid", "~report"), rows)


def _when(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))


def _quarantined(stats: m.ServerStats) -> Table:
    """Make a row for each process with slots in quarantine."""
    rows = [(str(pid), f"{slots:,}") for pid, slots in sorted(stats.quarantined_slots.items())]
    return table("Slots in quarantine until their writer ends or answers", ("pid", "slots"), rows)


def _mismatches(stats: m.ServerStats) -> Table:
    """Make a row for each value of a field in which instances of a model differ."""
    made = list[tuple[str, ...]]()
    for mismatch in stats.mismatches:
        advice = mismatch.advice or f"make {mismatch.field} the same everywhere"
        model, field = mismatch.model, mismatch.field
        for value, who in mismatch.values:
            made.append((model, field, value or "–", _UUID.sub(r"\1", ", ".join(who)), advice))
            model = field = advice = ""
    return table("Not shared", ("~model", "~field", "~value", "~instances", "~what to do"), made)
