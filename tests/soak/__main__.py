"""Is a byte, or an answer, ever wrong, though all that instances share is rewritten all the time,
and they are paused, stopped and killed?

    make soak ARGS="[--level soak|inplace|death|death_pool|planned|hits] [--seconds N] [--seed N]"

`soak`: engines that share through a pool far too small for their prompts, so that slots are
constantly rewritten. They and the server are killed and stopped, also around copies. Each load is
compared with what the memory must hold.

`inplace`: sharing in place. Owners' blocks are constantly handed out and rewritten, and readers
load from them and from each other, some slowly. They pause themselves at every step of the
protocol, are stopped and killed at any moment; the server, too. The namespace is reset, after which
the same chunks have other bytes.

`death`, `death_pool`: whole vLLMs, on GPUs if there are any, in place and through a pool, with so
few KV blocks that these are constantly used again. Tokens and log probabilities of each answer are
compared with those of a vLLM that shares nothing; no engine may end or leave a request without an
answer.

`planned`, `hits`: vLLM's own schedulers, without a model, for models of all kinds of block tables.
Is each block right whatever happens, and does a request find on another instance exactly what it
would find on the owner?

Each level has controls, which run the same with one rule broken: readers do not compare
generations after a copy; owners change generations only after writing, or publish before writing.
There wrong bytes or answers must be seen, or the zeros of the level prove nothing. One seed gives
the same decisions again, but not the same timing."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from .levels import LEVELS
from .run import faults, run, run_control

PLANNED_SECONDS = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a level and its controls. 1 if something was wrong, or too little happened."""
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--level", choices=[*LEVELS, "planned", "hits"], default="soak")
    option("--seconds", type=float, help="at most; a control takes half of it")
    option("--seed", type=int, default=int(time.time()), help="default: the time")
    options = parser.parse_args(arguments)
    if options.level not in LEVELS:
        chosen = import_module(f".{options.level}", __package__)
        return int(chosen.main(options.seconds or PLANNED_SECONDS, options.seed))
    level, seed = LEVELS[options.level](), options.seed
    if options.seconds:
        level = level._replace(seconds=options.seconds, control_seconds=options.seconds / 2)
    with tempfile.TemporaryDirectory(prefix="vcache-soak-shared-") as folder:
        level.prepare(shared := Path(folder))
        result = run(seed, level, shared)
        print(f"{options.level}: {result}", flush=True)
        found = faults(result, level)
        for control in level.controls:
            seen = run_control(control, seed, level, shared)
            print(f"{options.level}, control {control!r}: {seen}", flush=True)
            found += [] if seen.outcomes.wrong else [f"control {control!r}: nothing was seen"]
    print(f"{options.level}: {'; '.join(found) or 'as it should be'}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
