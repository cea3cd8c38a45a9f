"""Is a byte, or an answer, ever wrong, though all that instances share is rewritten all the time,
and they are paused, stopped and killed?

    python -m benchmarks.campaign [--level cpu|soak|death|death_pool|promises] [--loads N]
                                  [--seconds N] [--seed N] [--out FILE]

`cpu`: sharing in place. Owners' blocks are constantly handed out and rewritten, and readers
load from them and from each other, some slowly. All are real processes with real memory, and each
byte is compared. They pause themselves at every step of the protocol, are stopped and killed at any
moment, and start again under other names; the server is killed and stopped, too. The namespace is
reset, after which the same chunks have other bytes. One seed gives the same decisions again, but
not the same timing.

`soak`: engines that share through a pool far too small for their prompts, so that slots are
constantly rewritten. They are killed and stopped, also around copies. The server is killed and
stopped, runs out of descriptors, and is started again with a clock that was set back; its ledger
cannot grow, and clients show ledgers of earlier servers. A load counts if it brought something: the
whole memory is compared with what it must hold.

`death`, `death_pool`: whole vLLMs, on GPUs if there are any, that share in place or through a pool,
with so few KV blocks that these are constantly used again. Readers pause between the launch of most
loads and their verdicts; all of them, and the server, are stopped, starved and killed. Tokens and
log probabilities of each answer are compared with those of a vLLM that shares nothing
(`whole`); no engine may end or leave a request without an answer.

`promises`: the same vLLMs, which ask for the same prompts at the same time and wait for what the
others compute. In every state of a promise they are stopped, and die; they abort requests, preempt
them, and reset the namespace. No request may wait longer than its bound.

Controls run the same with one rule broken: readers ignore the generations, or the lease, after a
copy; owners change generations only after writing, or publish before writing; waits have no bound.
There wrong bytes, or requests past their bound, must be seen, or the zeros above prove nothing."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..results import Report
from .levels import LEVELS
from .rows import control_row, rows
from .run import campaign, run_control


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a level's campaign and its controls. 1 if a row missed its limit."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--level", choices=LEVELS, default="cpu")
    option("--loads", type=int, help="that bring something; default: the level's")
    option("--seconds", type=float, help="at most; its control half of it")
    option("--seed", type=int, default=int(time.time()), help="default: the time")
    option("--out", type=Path, help="result file; one that is there is continued")
    option("--commit", default="", help="the commit measured, where git cannot tell")
    options = parser.parse_args(arguments)
    name, seed, report = options.level, options.seed, Report(options.out, options.commit)
    level = LEVELS[name]()
    if options.seconds:
        level = level._replace(seconds=options.seconds, control_seconds=options.seconds / 2)
    loads = options.loads or level.loads
    with tempfile.TemporaryDirectory(prefix="vcache-campaign-shared-") as folder:
        level.prepare(shared := Path(folder))
        result = campaign(loads, seed, level, shared)
        report.add(rows(result, loads, name, level))
        for control in level.controls:
            seen = run_control(control, seed, level, shared)
            report.add([control_row(control, seen, name)])
    return int(report.missed)


if __name__ == "__main__":
    raise SystemExit(main())
