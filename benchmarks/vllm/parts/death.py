"""In place: how long after an owner's SIGKILL its memory is free, though a reader has it mapped;
and whether it starts again at once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from ...processes import Child, until
from ...results import Clock, Row, fraction, row
from ..fleet import OWNERS, Fleet
from ..prompts import Prompts

TIMES = 3
SECONDS = 60.0
PATIENCE = 20.0
ALLOWED_MS = 1000.0
LENGTH = "16k"
MOST = 0.95
"""Share of the KV cache that must be free: the driver rounds."""


def owner_death(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """A computes a prompt; B reads it, and so maps A's KV cache; A is killed, and starts again with
    the same settings.
    """
    samples: list[float] = []
    again: list[bool] = []
    length = fleet.scale.lengths[LENGTH]
    for turn in range(TIMES):
        if turn and clock.left < SECONDS:
            break
        b = fleet.instance("b")
        prompt = prompts.new(length)
        fleet.compute("a", prompt)
        read = b.ask("generate", SECONDS, tokens=prompt, count=1)["cached"]
        again.append(read == fleet.scale.hit(length))
        free = _host(b) if fleet.scale.cpu else _gpu(fleet)
        started = time.monotonic()
        fleet.kill("a")
        until(free, PATIENCE, 0.002)
        samples.append(1e3 * (time.monotonic() - started))
    fleet.instance("a")
    what = (
        "from an owner's SIGKILL, with a reader that has its KV cache mapped, until that "
        "memory is free"
    )
    held = (
        "rounds in which a reader hit all whole chunks of an owner that had just been "
        "started, again after each SIGKILL"
    )
    return [
        row(f"{fleet.rows}_owner_death_ms", "ms", samples, ALLOWED_MS, what=what, at_most=1.0),
        fraction(f"{fleet.rows}_owner_restarts", again, held),
    ]


def _gpu(fleet: Fleet) -> Callable[[], bool]:
    """A function that tells whether the memory of A's KV cache is free again on its GPU."""
    helper = fleet.helper()
    due = helper.ask("free", ordinal=0) + MOST * OWNERS * fleet.scale.kv_bytes
    return lambda: bool(helper.ask("free", ordinal=0) >= due)


def _host(reader: Child) -> Callable[[], bool]:
    """A function that tells whether the reader has unmapped all of A's memory: the last process to
    do so frees it.
    """

    def mapped() -> int:
        lines = Path(f"/proc/{reader.pid}/maps").read_text().splitlines()
        spans = [re.match(r"(\w+)-(\w+)", line) for line in lines if "vcache-kv" in line]
        return sum(int(span[2], 16) - int(span[1], 16) for span in spans if span)

    before = mapped()
    return lambda: mapped() < before
