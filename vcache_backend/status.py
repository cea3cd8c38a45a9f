"""What a server's statistics say: whether sharing works, who shares, the hit rate."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from vcache_backend.protocol import messages as m

SILENT_SECONDS = 10.0
"""After this silence an instance does not answer any more: heartbeats come every second."""


def plain(value: Any) -> Any:
    """Convert `value` for JSON, with structs as dicts. (On the wire they are arrays.)"""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def summary(stats: m.ServerStats) -> dict[str, Any]:
    """`stats` as plain values, with the `verdict`, `ok`, and the `hit_rate`."""
    good, said = verdict(stats)
    asked, found = tokens(stats)
    rate = found / asked if asked else None
    return {**plain(stats), "verdict": said, "ok": good, "hit_rate": rate}


def edges(stats: m.ServerStats) -> list[tuple[str, str, int]]:
    """Who has read from whom: owner, reader and tokens, the most first."""
    pids = {one.pid: one.name for one in stats.instances if one.name and not one.id}
    names = {one.id: one.name or one.id[:8] for one in stats.instances if one.id}
    names["pool"] = "the pool"
    read = Counter[tuple[str, str]]()
    for one in stats.reads:
        reader = names.get(one.reader) or pids.get(one.pid, f"pid {one.pid or '–'}")
        pair = names.get(one.instance, f"{one.instance[:8]}, ended"), reader
        # Each worker of an instance reads its part of the same tokens.
        read[pair] = max(read[pair], one.tokens)
    return [(*pair, count) for pair, count in read.most_common() if count]


def saved(stats: m.ServerStats) -> dict[str, str]:
    """What vcache has saved, by name."""
    loads, loaded = stats.minute
    rate = loads / min(max(stats.uptime_seconds, 1.0), 60.0)
    return {
        "tokens not computed in the last minute": f"{loaded:,}",
        "since the start": f"{stats.counters.get('loaded_tokens', 0):,}",
        "requests/s with a hit": f"{rate:,.1f}",
    }


def tokens(stats: m.ServerStats) -> tuple[int, int]:
    """Prompt tokens looked up since the server's start, and tokens found."""
    asked, found = zip((0, 0), *stats.hits.values(), strict=True)
    return sum(asked), sum(found)


def verdict(stats: m.ServerStats) -> tuple[bool, str]:
    """Say whether sharing works, and who shares, in one line. Faults come first."""
    faults = _faults(stats)
    if not faults:
        return True, _sharing(stats)
    return False, faults[0] + (f"; and {len(faults) - 1} more" if len(faults) > 1 else "")


def _faults(stats: m.ServerStats) -> list[str]:
    """List what keeps instances from sharing."""
    instances = stats.instances
    faults = [f"{_named(one)} {fault}" for one in instances if (fault := trouble(one))]
    if not stats.segments:
        said = [one.text for one in stats.reports if "lends nothing to the pool: " in one.text]
        lacks = "shares through the pool, to which nobody lends memory"
        lacks += f": {said[-1]}" if said else ""
        faults += [f"{_named(one)} {lacks}" for one in instances if not one.id]
    differ = stats.mismatches
    return faults + [
        f"instances of {one.model} do not share: {one.field} differs" for one in differ
    ]


def _sharing(stats: m.ServerStats) -> str:
    """Say who shares, and the hit rate."""
    instances, (asked, found) = stats.instances, tokens(stats)
    rate = f"{found / asked:.1%} of the tokens looked up were found" if found else "no hit yet"
    if not found and stats.counters.get("loaded_tokens"):
        rate = "hits begin to come"  # look-ups are told with a heartbeat, loads at once
    elif not asked:
        rate = "nothing was looked up yet"
    if not instances:
        return "no instance is connected"
    if len(instances) == 1:
        return f"{_named(instances[0])} is the only one connected; {rate}"
    namespaces = Counter(one.namespace for one in instances)
    together = [one for one in instances if namespaces[one.namespace] > 1]
    if not together:
        return f"{len(instances)} instances, all of different models; {rate}"
    ways = Counter("in place" if one.id else "through the pool" for one in together)
    how = f" {next(iter(ways))}"
    if len(ways) > 1:
        how = ": " + ", ".join(f"{count} {way}" for way, count in ways.items())
    alone = len(instances) - len(together)
    others = f"; {alone} of another model" if alone else ""
    return f"{len(together)} instances share{how}{others}; {rate}"


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
    who = f"instance {instance.id[:8]}" if instance.id else f"the instance of pid {instance.pid}"
    return f"{who} at {instance.name}" if instance.name else who


def duration(seconds: float) -> str:
    """`seconds` in its two largest units, such as `2 h 5 min`."""
    left = int(seconds)
    for unit, name, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if left >= unit:
            return f"{left // unit} {name} {left % unit // below} {smaller}"
    return f"{left // 60} min {left % 60} s"
