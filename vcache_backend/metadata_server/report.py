"""News for the operator: connected instances that do not share, the reasons, and reports. Pure."""

from __future__ import annotations

import hashlib
import resource
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Hashable
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from vcache_backend.errors import MAX_LINE_CHARS, MAX_SHOWN_CHARS, printable
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.instances import described
from vcache_backend.metadata_server.processes import Peer, ProcessId
from vcache_backend.protocol import messages as m

if TYPE_CHECKING:
    from vcache_backend.metadata_server.requests import Service


MAX_NAMESPACES = 128
"""The most namespaces that the statistics name."""
MAX_COMPARED = 16
"""The most namespaces of one model that are compared, and the most instances named for a value."""


_FOLLOW = ("extra.shards", "kv_layout")
"""Fields that follow from others."""
_SEED = "start all instances with the same PYTHONHASHSEED (0 for example)"
_OTHERS = "it follows from other settings, such as tp_size and the attention backend"
_ADVICE = {
    "extra.hash_root": f"{_SEED}, and the same hash algorithm",
    **dict.fromkeys(_FOLLOW, f"{_OTHERS}: give all instances the same"),
}
"""What to do about the fields that do not name a setting."""


class Layouts:
    """The layouts of connected instances, from their hellos. Clients without a model are tools."""

    def __init__(self) -> None:
        self.clients: dict[int, Peer] = {}
        """All connected clients by number, including tools."""
        self.hits: dict[str, tuple[int, int]] = {}
        """By namespace, the tokens looked up, and found, since the server's start."""

    def add(self, client: Peer, layout: dict[str, str]) -> list[str]:
        """Add a client. Returns a line for each other namespace of the same model."""
        if layout.get("model"):
            client.layout = {name: _short(value) for name, value in layout.items()}
        client.parent = processes.parent(client.process)
        client.spawner = processes.spawner(client.process)
        others = self._by_model()[client.layout["model"]] if client.layout else {}
        others.pop(client.namespace, None)
        self.clients[client.id] = client
        lines = [_line(client, peers[0]) for peers in list(others.values())[:8]]
        return [line for line in lines if line]

    def drop(self, client: int) -> None:
        self.clients.pop(client, None)

    def looked_up(self, client: Peer, asked: int, found: int) -> None:
        """Count tokens that an instance has looked up, and found tokens, some of which the instance
        may have looked up earlier."""
        if name := printable(client.namespace):
            asked_before, found_before = self.hits.pop(name, (0, 0))
            asked += asked_before
            self.hits[name] = asked, min(found_before + found, asked)
            if len(self.hits) > MAX_NAMESPACES:
                del self.hits[next(iter(self.hits))]

    def through_pool(
        self, in_place: Container[ProcessId], stopped: Callable[[ProcessId], bool]
    ) -> list[m.InstanceStats]:
        """The instances that share through the pool only. in_place: processes of other instances.

        Children of an instance's process that sent no layout are its workers. Processes with the
        same parent and name are one instance."""
        children = defaultdict[int, list[Peer]](list)
        for each in self.clients.values():
            if not each.layout:
                for pid in filter(None, (each.process.pid, each.parent)):
                    children[pid].append(each)
        instances = defaultdict[Hashable, list[Peer]](list)
        for each in self.clients.values():
            if each.layout and each.process not in in_place:
                identity = (each.name, each.parent) if each.name and each.parent else each.id
                instances[identity] += [each, *children[each.process.pid]]
        made = list[m.InstanceStats]()
        for peers in list(instances.values())[:MAX_NAMESPACES]:
            gpus = (peer.device for peer in peers if peer.medium == "cuda")
            device = next(gpus, peers[0].device)
            made.append(described(peers[0], peers[: m.MAX_RANKS], stopped, device=device))
        return made

    def namespaces(self) -> dict[str, str]:
        clients = self.clients.values()
        named = {each.namespace: each.layout["model"] for each in clients if each.layout}
        return {
            printable(name): printable(model)
            for name, model in list(named.items())[:MAX_NAMESPACES]
        }

    def mismatches(self) -> list[m.Mismatch]:
        """The fields in which connected instances of one model differ now."""
        mismatches: list[m.Mismatch] = []
        for groups in self._by_model().values():
            if len(groups) > 1 and len(mismatches) < 64:
                mismatches += _mismatches(list(groups.values())[:MAX_COMPARED])
        return mismatches[:64]

    def _by_model(self) -> dict[str, dict[str, list[Peer]]]:
        """The instances of each model, by namespace."""
        models = defaultdict[str, dict[str, list[Peer]]](dict)
        for each in self.clients.values():
            if each.layout:
                models[each.layout["model"]].setdefault(each.namespace, []).append(each)
        return models


def _mismatches(groups: list[list[Peer]]) -> list[m.Mismatch]:
    """The fields in which groups of equal instances of one model differ."""
    layouts = [group[0].layout for group in groups]
    mismatches: list[m.Mismatch] = []
    # These differ only with other fields, between the stages of one instance, or for people.
    apart = {"namespace", "pp_rank", "vllm"}
    names = {name for layout in layouts for name in layout} - apart
    for name in sorted(names, key=lambda name: (name in _FOLLOW, name)):
        holders = defaultdict[str, list[Peer]](list)
        for layout, group in zip(layouts, groups, strict=True):
            holders[layout.get(name, "")] += group[:MAX_COMPARED]
        if len(holders) > 1:
            values = [
                (printable(value), list(map(_who, instances[:MAX_COMPARED])))
                for value, instances in holders.items()
            ]
            model, field = printable(layouts[0]["model"]), printable(name)
            mismatches.append(m.Mismatch(model, field, values, _ADVICE.get(name, "")))
    return mismatches


def _short(text: str) -> str:
    """Shorten `text` for people, and append a digest, so that different texts stay different."""
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return text[:MAX_SHOWN_CHARS] + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _line(new: Peer, other: Peer) -> str:
    """Say in words why two instances of one model do not share; empty if no field differs."""
    said = list[str]()
    for each in _mismatches([[new], [other]])[:8]:
        values = f"{each.values[0][0]!r} here, {each.values[1][0]!r} there"
        said += filter(None, (f"{each.field}: {values}", each.advice))
    whose = f"another instance of {printable(new.layout['model'])!r} ({_who(other)})"
    what = f"{whose} does not share its chunks with this one: "
    return (what + "; ".join(said))[:MAX_LINE_CHARS] if said else ""


def _who(client: Peer) -> str:
    pid = client.process.pid
    return f"pid {pid} on {client.device}" if pid else f"another pid namespace, {client.device}"


class Minute:
    """The loads and the loaded tokens of the last 60 seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._now = clock
        self._seconds = deque[tuple[float, int, int]]()

    def add(self, loads: int, tokens: int) -> None:
        now = self._now()
        if self._seconds and now < self._seconds[-1][0] + 1:
            now, loads_before, tokens_before = self._seconds.pop()
            loads, tokens = loads + loads_before, tokens + tokens_before
        self._seconds.append((now, loads, tokens))
        self.total()

    def total(self) -> tuple[int, int]:
        while self._seconds and self._seconds[0][0] < self._now() - 60:
            self._seconds.popleft()
        return sum(one[1] for one in self._seconds), sum(one[2] for one in self._seconds)


class Reports:
    """The newest reports. Each text is kept once for each connection, with its latest time."""

    MOST = 64

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._now = wall_clock
        self._kept: dict[tuple[int, str], m.Reported] = {}

    def add(self, client: Peer, level: m.Level, text: str) -> m.Reported | None:
        """Keep a report as one printable line. None if the connection has sent the line before."""
        line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        earlier = self._kept.pop((client.id, line), None)
        reported = m.Reported(self._now(), level, client.process.pid, client.device, line)
        self._kept[client.id, line] = reported
        if len(self._kept) > self.MOST:
            del self._kept[next(iter(self._kept))]
        return reported if earlier is None else None

    def newest_last(self) -> list[m.Reported]:
        return list(self._kept.values())


def server_stats(service: Service) -> m.ServerStats:
    """Collect all statistics."""
    directory, layouts = service.directory, service.layouts
    quarantined, slots = directory.quarantined(), Counter[int]()
    for write in quarantined:
        slots[write.process.pid] += len(write.places)
    # One process may belong to a hundred instances.
    stopped, in_place = cache(processes.stopped), service.instances
    instances = [one.stats(id_, stopped) for id_, one in in_place.of.items()]
    instances += layouts.through_pool(in_place.processes(), stopped)
    stats = m.ServerStats(
        run_id=service.run_id,
        uptime_seconds=time.monotonic() - service.started,
        clients=len(layouts.clients),
        chunks=len(directory),
        reservations=len(directory.writes) - len(quarantined),
        quarantined_slots=dict(slots),
        counters=dict(service.counters),
        latency={
            n: m.Latency(h.count, h.percentile(0.5), h.percentile(0.99), h.total_us)
            for n, h in service.latency.items()
        },
        segments=directory.segments(),
        namespaces=layouts.namespaces(),
        rss_bytes=_rss_bytes(),
        reports=service.reports.newest_last(),
        mismatches=layouts.mismatches(),
        instances=instances,
        reads=in_place.reads(layouts.clients.values()),
        hits=dict(layouts.hits),
        minute=service.minute.total(),
    )
    return fitting(stats)


def fitting(stats: m.ServerStats) -> m.ServerStats:
    """Cut `stats` to the size of a message: halve the lists as often as needed."""
    newest = "reports", "hits", "namespaces"
    first = "mismatches", "reads", "instances", "quarantined_slots"
    while len(msgspec.msgpack.encode(stats)) > m.MAX_MESSAGE_BYTES:
        halves = {}
        for name in newest + first:
            some = getattr(stats, name)
            half = slice((len(some) + 1) // 2, None) if name in newest else slice(len(some) // 2)
            halves[name] = dict(list(some.items())[half]) if isinstance(some, dict) else some[half]
        stats = msgspec.structs.replace(stats, **halves)
    return stats


def _rss_bytes() -> int:
    """This process's resident memory; 0 if no descriptor is free to read it."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
