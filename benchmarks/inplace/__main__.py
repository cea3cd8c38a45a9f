"""Does a load out of another instance's live KV cache ever bring a wrong byte, though blocks are
used again all the time?

    python -m benchmarks.inplace [--level cpu|live|death|death_pool|promises] [--loads N] [--seed N]
                                 [--out FILE]

`cpu`: one metadata server, owners whose blocks are constantly handed out and rewritten, and readers
that load from them and from each other, some slowly. All are real processes with real memory, and
each byte is compared (`instance`). They pause themselves at every step of the protocol, are
stopped and killed at any moment, and start again under other names; the server is killed and
stopped, too. One seed gives the same decisions again, but not the same timing.

`live`: owners are live vLLMs on two GPUs, or a tiny one on the CPU, whose blocks are constantly
used again. Readers do not run vLLM; they compare all that they load with checksums from the owners
(`live`, `witness`).

`death`, `death_pool`: whole vLLMs, on GPUs if there are any, that share in place or through a pool,
with so few KV blocks that these are constantly used again. Readers pause between the launch of most
loads and their verdicts; all of them, and the server, are stopped, starved and killed. Tokens and
log probabilities of each answer are compared with those of a vLLM that shares nothing
(`whole`); no engine may end or leave a request without an answer.

`promises`: the same vLLMs, which ask for the same prompts at the same time and wait for what the
others compute. In every state of a promise they are stopped, and die; they abort requests, preempt
them, and reset the namespace. No request may wait longer than its bound.

Controls run the same with one rule broken: readers ignore the generations after a copy; owners
change generations only after writing, or publish before writing; waits have no bound. There wrong
bytes, or requests past their bound, must be seen, or the zeros above prove nothing."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..results import Report, Row
from .levels import LEVELS
from .rows import control_row, rows
from .run import campaign, run_control


def measure(
    name: str,
    loads: int,
    seed: int,
    add: Callable[[Sequence[Row]], object],
    seconds: float = 0.0,
) -> None:
    """Run a level's campaign and its controls, and `add` rows as they come."""
    level = LEVELS[name]()
    if seconds:
        level = level._replace(seconds=seconds, control_seconds=seconds / 2)
    with tempfile.TemporaryDirectory(prefix="vcache-inplace-shared-") as folder:
        level.prepare(shared := Path(folder))
        result = campaign(loads or level.loads, seed, level=level, shared=shared)
        add(rows(result, loads or level.loads, name, level))
        for control in level.controls:
            seen = run_control(control, seed, level=level, shared=shared)
            add([control_row(control, seen, name)])


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a row missed its limit."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.inplace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--level", choices=LEVELS, default="cpu")
    parser.add_argument(
        "--loads", type=int, default=0, help="that bring something; default: the level's"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="at most; its control half of it"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--out", type=Path, help="result file; one that is there is continued")
    parser.add_argument("--commit", default="", help="the commit measured, where git cannot tell")
    options = parser.parse_args(arguments)
    report = Report(options.out, options.commit)
    measure(options.level, options.loads, options.seed, report.add, options.seconds)
    return int(report.missed)


if __name__ == "__main__":
    raise SystemExit(main())
