"""What connected instances want a person to know. Pure: it takes a clock and returns values."""

from __future__ import annotations

from collections.abc import Callable

from vcache_backend.metadata_server.messages import Level, Reported
from vcache_backend.metadata_server.placement import Peer

MAX_REPORTS = 64


class Reports:
    """The newest reports, at most `MAX_REPORTS`. One text of one connection is kept once, with the time it was last said."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._now = wall_clock
        self._kept: dict[tuple[int, str], Reported] = {}

    def add(self, client: Peer, level: Level, text: str) -> Reported | None:
        """Keep what `client` says, as one printable line; None if it is among those kept already."""
        line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
        known = self._kept.pop((client.id, line), None)
        reported = Reported(self._now(), level, client.process.pid, client.device, line)
        self._kept[client.id, line] = reported
        if len(self._kept) > MAX_REPORTS:
            del self._kept[next(iter(self._kept))]
        return reported if known is None else None

    def newest_last(self) -> list[Reported]:
        return list(self._kept.values())
