"""The output of commands: tables of 80 columns, a live screen, and JSON."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vcache_backend.config import ByteSize
from vcache_backend.errors import ConfigError, VCacheError, printable
from vcache_backend.proofs import Proof
from vcache_backend.protocol import messages as m
from vcache_backend.status import duration, edges, saved, state, trouble, verdict

_STYLES = {"ok": "green", "warn": "yellow", "error": "bold red", "fail": "bold red"}
if TYPE_CHECKING:
    from vcache_backend.doctor import Finding
    from vcache_backend.protocol.client import Client

Cell = str | Text


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def show(*parts: RenderableType) -> None:
    """Print texts and tables. A narrow terminal folds lines; piped, a table keeps its columns."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    # rich leaves out a column without room.
    console.width = max(console.width, 80)
    for part in parts:
        console.print(part)


def level(name: str) -> Text:
    return Text(name, _STYLES.get(name, ""))


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """Make a table without rules. Cells are plain text, never markup. Marks before a column's name:
    `>` right-justified, `~` may be wrapped."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    made.box, made.padding = None, (0, 2, 0, 0)
    for name in columns:
        made.add_column(
            name.lstrip("~>"),
            no_wrap=not name.startswith("~"),
            overflow="fold",
            justify="right" if name.startswith(">") else "left",
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def findings(found: Sequence[Finding]) -> Table:
    """Make a row for each finding, the worst first."""
    rows = [
        (level(one.status), one.check, f"{one.detail}\n→ {one.advice}".rstrip("\n→ "))
        for status in ("fail", "warn", "ok")
        for one in found
        if one.status == status
    ]
    return table(None, ("", "check", "~finding → what to do"), rows)


def proved(proof: Proof, file: str) -> Iterator[Text]:
    """Make the verdict of `vcache prove`. file: where the proof is kept; empty: there is none."""
    what = proof.combination
    how = f"vLLM {what.vllm}, torch {what.torch}, vcache {what.vcache}, "
    how += f"{what.share} on {what.device}"
    yield Text(f"{'Proved' if file else 'NOT proved'}: {how}", f"bold {'green' if file else 'red'}")
    yield from [Text(file)] if file else []


# ---- `vcache status`


def status(stats: m.ServerStats) -> Iterator[RenderableType]:
    """Make the output of `vcache status`: the verdict, what was saved, faults, instances, who read
    from whom, and the pool."""
    good, said = verdict(stats)
    style = "bold yellow" if not good else "bold green" if len(stats.instances) > 1 else "bold"
    yield Text(said, style)
    spared = saved(stats)
    rate = {name: spared.pop(name) for name in list(spared)[2:]}
    yield _counts(**spared)
    up, memory = duration(stats.uptime_seconds), ByteSize(stats.rss_bytes).about
    yield _counts(**rate, up=up, clients=stats.clients, memory=memory)
    if known := sorted({one.vllm for one in stats.instances if one.vllm}):
        yield _counts(vllm="; ".join(known))
    yield _counts(chunks=stats.chunks, reservations=stats.reservations)
    faults = _mismatches(stats), _quarantined(stats), _reports(stats.reports)
    tables = *faults, _instances(stats), _reads(stats), _segments(stats)
    yield from (each for each in tables if each.row_count)
    counts = Counter(stats.counters)
    if promised := counts["promised_chunks"]:
        waited = f"{counts['waited_milliseconds'] / 1e3:,.1f} s"
        waited += f"   for {counts['awaited_tokens']:,} tokens   {promised:,} chunks promised"
        yield _counts(waits=f"{waited}, {counts['promised_chunks_broken']:,} broken")


def _segments(stats: m.ServerStats) -> Table:
    rows = [
        (
            info.id,
            info.device[:12] if info.medium == "cuda" else info.device,
            f"{info.used / info.nbytes:.0%}",
            ByteSize(info.used).about,
            ByteSize(info.nbytes).about,
            f"{info.chunks:,}",
        )
        for info in stats.segments
    ]
    columns = "~segment", "~device", ">full", ">used", ">size", ">chunks"
    return table("Segments", columns, rows)


def _counts(**counts: int | str) -> Text:
    """Make a line of names and values."""
    text = Text()
    for name, value in counts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        text.append(f"{'   ' if text else ''}{name} ", "dim").append(shown)
    return text


def _instances(stats: m.ServerStats) -> Table:
    rows = [
        (
            one.id[:8] or "–",
            str(one.pid or "–"),
            one.name or "–",
            one.device[:12],
            f"{one.silent:.1f} s",
            Text(state(one), style="yellow" if trouble(one) else ""),
        )
        for one in stats.instances
    ]
    columns = "instance", ">pid", "~port", "device", ">last heard", "~state"
    return table("Instances", columns, rows)


def _reads(stats: m.ServerStats) -> Table:
    """Draw an arrow from owner to reader for each pair of instances, the most tokens first."""
    said = [(owner, f" {count:,} ", reader) for owner, reader, count in edges(stats)[:8]]
    width = max((len(count) for _, count, _ in said), default=0)
    rows = [(owner, f"─{count:─^{width}}─▶", reader) for owner, count, reader in said]
    return table("Who read from whom", ("~owner", "tokens", "~reader"), rows)


def _reports(reports: Sequence[m.Reported]) -> Table:
    """Make a row for each of the newest reports, newest first."""
    rows = [
        (
            time.strftime("%m-%d %H:%M:%S", time.localtime(one.time)),
            level(one.level),
            str(one.pid),
            one.text,
        )
        for one in reversed(reports[-5:])
    ]
    more = f", the newest 5 of {len(reports)} (--json has all)" if len(reports) > 5 else ""
    return table(f"Reports{more}", ("when", "", "pid", "~report"), rows)


def _quarantined(stats: m.ServerStats) -> Table:
    """Make a row for each process with slots in quarantine."""
    why = "the process may still write there; end it if it hangs"
    rows = [(str(pid), f"{slots:,}", why) for pid, slots in sorted(stats.quarantined_slots.items())]
    return table("Slots in quarantine", (">pid", ">slots", "~what to do"), rows)


def _mismatches(stats: m.ServerStats) -> Table:
    """Make a row for each value of a field in which instances of a model differ."""
    rows = list[Sequence[str]]()
    for one in stats.mismatches:
        texts = one.model, one.field, one.advice or f"make {one.field} the same everywhere"
        for value, who in one.values:
            model, field, advice = texts
            rows.append((model, field, value or "–", ", ".join(who), advice))
            texts = "", "", ""
    return table("Not shared", ("~model", "~field", "~value", "~instances", "~what to do"), rows)


# ---- `vcache top`


def live(client: Client) -> None:
    """Show the status each second, until SIGINT or SIGTERM. For the main thread. Goes on while the
    server is away. Raises ConfigError if stdout is no terminal."""
    if not sys.stdout.isatty():
        raise ConfigError("vcache top needs a terminal; `vcache status` prints the status once")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    with Live(screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(_picture(client), refresh=True)
            time.sleep(1)


def _picture(client: Client) -> Group:
    """Ask the server once."""
    try:
        return Group(*status(client.stats()))
    except VCacheError as error:
        return Group(Text(printable(str(error)), "bold red"))


def _end(number: int, frame: object) -> None:
    """Leave `live`, which gives the terminal back."""
    raise SystemExit(0)
