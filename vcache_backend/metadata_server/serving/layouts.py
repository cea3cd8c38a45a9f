"""News for the operator: which connected instances do not share and why, and their reports.
Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Hashable

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.client_lines import MAX_SHOWN_CHARS, Caller, printable
from vcache_backend.metadata_server.instances.registry import liveness
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.records import ProcessId

MAX_LINES = 8
"""The most lines about other namespaces in one welcome."""
MAX_NAMESPACES = 128
"""The most namespaces that the statistics name."""
MAX_COMPARED = 16
"""The most namespaces that are compared for the statistics."""
MAX_MISMATCHES = 64
"""The most mismatches in the statistics."""
MAX_INSTANCES = 16
"""The most instances named for one value of a field."""
MAX_REPORTS = 64
MAX_LINE_CHARS = 600
_APART = ("namespace", "pp_rank")
"""Fields that differ only because other fields do, or between the stages of one instance."""
_SEED = (
    "start all instances with the same PYTHONHASHSEED (0 for example), and the same hash algorithm"
)
ADVICE = {"extra.hash_probe": _SEED, "extra.hash_root": _SEED}
"""Advice for fields whose names do not say what to set."""


class Layouts:
    """The layouts of connected instances, from their hellos. Clients without a model are tools."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Peer, dict[str, str]]] = {}
        self._connected: dict[int, tuple[Peer, int]] = {}
        """All clients, each with its parent process's pid."""
        self._mismatches: list[m.Mismatch] | None = []
        self.hits: dict[str, list[int]] = {}
        """For each namespace the tokens that instances have looked up, and found, since the
        server's start."""
        self._counted: dict[int, tuple[str, list[int]]] = {}
        """For each client its namespace, and the counts of that namespace."""

    def add(self, client: Peer, layout: dict[str, str]) -> list[str]:
        """Add an instance. Returns a line for each other namespace of the same model."""
        self._connected[client.id] = client, processes.parent(client.process)
        if not layout.get("model"):
            return []
        layout = {name: _short(value) for name, value in layout.items()}
        others: dict[str, tuple[Peer, dict[str, str]]] = {}
        for peer, other in self._of.values():
            if other["model"] == layout["model"]:
                others.setdefault(other.get("namespace", ""), (peer, other))
        others.pop(layout.get("namespace", ""), None)
        self._of[client.id] = client, layout
        self._mismatches = None
        self._count(client, layout)
        lines = [
            _line(layout, client, other, peer) for peer, other in list(others.values())[:MAX_LINES]
        ]
        return [line for line in lines if line]

    def looked_up(self, client: int, asked: int, found: int) -> None:
        """Count tokens that an instance has looked up, and found; it may have looked up some of the
        found ones earlier."""
        if client in self._counted:
            _, totals = self._counted[client]
            totals[0] += asked
            totals[1] = min(totals[1] + found, totals[0])

    def _count(self, client: Peer, layout: dict[str, str]) -> None:
        if name := printable(layout.get("namespace", "")):
            totals = self.hits.pop(name, [0, 0])
            if len(self.hits) >= MAX_NAMESPACES:
                connected = {id(counts) for *_, counts in self._counted.values()}
                ended = (old for old, counts in self.hits.items() if id(counts) not in connected)
                gone = next(ended, next(iter(self.hits)))
                del self.hits[gone]
            self.hits[name] = totals
            self._counted[client.id] = name, totals

    def forget_gone(self, stores: Callable[[bytes], bool]) -> None:
        """Forget the counts of namespaces that have no client and no chunks. stores: whether a
        namespace has chunks."""
        connected = {name for name, *_ in self._counted.values()}
        for name in [
            name for name in self.hits if name not in connected and not stores(_prefix(name))
        ]:
            del self.hits[name]

    def drop(self, client: int) -> None:
        """Remove an instance that is gone."""
        self._connected.pop(client, None)
        self._counted.pop(client, None)
        if self._of.pop(client, None) is not None:
            self._mismatches = None

    def through_pool(self, in_place: Container[ProcessId]) -> list[m.InstanceStats]:
        """The instances that share through the pool only. in_place: the processes that share in
        place.

        Children of an instance's process that sent no layout are its workers. Processes with the
        same parent and name are one instance."""
        children: dict[int, list[Peer]] = {}
        for id_, (peer, parent) in self._connected.items():
            if id_ not in self._of:
                for pid in filter(None, (peer.process.pid, parent)):
                    children.setdefault(pid, []).append(peer)
        instances: dict[Hashable, tuple[str, list[Peer]]] = {}
        for id_, (peer, layout) in self._of.items():
            if peer.process not in in_place:
                _, parent = self._connected[id_]
                identity = (peer.name, parent) if peer.name and parent else id_
                _, peers = instances.setdefault(identity, (layout.get("namespace", ""), []))
                peers += [peer, *children.get(peer.process.pid, ())]
        return [
            m.InstanceStats(
                "",
                next((peer.device for peer in peers if peer.medium == "cuda"), peers[0].device),
                peers[0].process.pid,
                0,
                0,
                0,
                name=peers[0].name,
                namespace=namespace,
                **liveness(peers[: m.MAX_RANKS]),
            )
            for namespace, peers in list(instances.values())[:MAX_NAMESPACES]
        ]

    def namespaces(self) -> dict[str, str]:
        """The model of each namespace."""
        named = {layout.get("namespace", ""): layout["model"] for _, layout in self._of.values()}
        return {
            printable(name): printable(model)
            for name, model in list(named.items())[:MAX_NAMESPACES]
        }

    def mismatches(self) -> list[m.Mismatch]:
        """The fields in which connected instances of one model differ now."""
        if self._mismatches is None:
            self._mismatches = self._compare()
        return self._mismatches

    def _compare(self) -> list[m.Mismatch]:
        """Compare at most `MAX_COMPARED` namespaces, so that a client with very many names delays
        the others by a millisecond at most."""
        of_model: dict[str, dict[str, tuple[dict[str, str], list[Peer]]]] = {}
        for client, layout in self._of.values():
            groups = of_model.setdefault(layout["model"], {})
            groups.setdefault(layout.get("namespace", ""), (layout, []))[1].append(client)
        left = MAX_COMPARED
        mismatches: list[m.Mismatch] = []
        for model, groups in of_model.items():
            if 1 < len(groups) and left > 1:
                some = list(groups.values())[:left]
                left -= len(some)
                mismatches += _mismatches(model, some)
        return mismatches[:MAX_MISMATCHES]


def _mismatches(model: str, groups: list[tuple[dict[str, str], list[Peer]]]) -> list[m.Mismatch]:
    mismatches: list[m.Mismatch] = []
    for name in sorted({name for layout, _ in groups for name in layout}.difference(_APART)):
        holders: dict[str, list[Peer]] = {}
        for layout, clients in groups:
            holders.setdefault(layout.get(name, ""), []).extend(clients[:MAX_INSTANCES])
        if len(holders) > 1 and len(mismatches) < MAX_MISMATCHES:
            values = [
                (printable(value), [_who(client) for client in clients[:MAX_INSTANCES]])
                for value, clients in holders.items()
            ]
            mismatches.append(
                m.Mismatch(printable(model), printable(name), values, ADVICE.get(name, ""))
            )
    return mismatches


def _prefix(name: str) -> bytes:
    """The first bytes of a namespace's keys, from its name; b"" if `name` names no namespace."""
    try:
        return bytes.fromhex(name)
    except ValueError:
        return b""


def _short(text: str) -> str:
    """Shorten `text` for people, and append a digest, so that different texts stay different."""
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return text[:MAX_SHOWN_CHARS] + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _line(layout: dict[str, str], client: Peer, other: dict[str, str], peer: Peer) -> str:
    """Say in words why two instances of one model do not share; empty if no field differs."""
    differ = [
        (
            f"{mismatch.field}: {printable(layout.get(mismatch.field, ''))!r} here, "
            f"{printable(other.get(mismatch.field, ''))!r} there"
        )
        for mismatch in _mismatches(layout["model"], [(layout, [client]), (other, [peer])])
    ][:MAX_LINES]
    if not differ:
        return ""
    names = {text.partition(":")[0] for text in differ}
    advice = dict.fromkeys(text for name, text in ADVICE.items() if name in names)
    whose = f"another instance of {printable(layout['model'])!r} ({_who(peer)})"
    return "; ".join(
        [f"{whose} does not share its chunks with this one: {differ[0]}", *advice, *differ[1:]]
    )[:MAX_LINE_CHARS]


def _who(client: Peer) -> str:
    return (
        f"pid {client.process.pid} on {client.device}"
        if client.process.pid
        else f"another pid namespace, {client.device}"
    )


class Reports:
    """The newest reports, at most `MAX_REPORTS`. Beyond it, the client with the most reports loses
    its oldest. Each text is kept once for each connection, with its latest time."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._now = wall_clock
        self._kept: dict[tuple[int, str], tuple[Caller, m.Reported]] = {}

    def add(self, client: Peer, level: m.Level, text: str) -> m.Reported | None:
        """Keep a client's report as one printable line. None if the connection has sent the text
        before."""
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
        earlier = self._kept.pop((client.id, line), None)
        reported = m.Reported(self._now(), level, client.process.pid, client.device, line)
        self._kept[client.id, line] = client.caller, reported
        if len(self._kept) > MAX_REPORTS:
            ((most, _),) = Counter(caller for caller, _ in self._kept.values()).most_common(1)
            del self._kept[next(key for key, (caller, _) in self._kept.items() if caller == most)]
        return reported if earlier is None else None

    def newest_last(self) -> list[m.Reported]:
        return [reported for _, reported in self._kept.values()]
