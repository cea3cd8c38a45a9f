"""Is a byte ever wrong? Engines retrieve, check and store while all that they share is killed,
stopped and damaged.

    python -m benchmarks.soak [--retrieves 100000] [--minutes M] [--seed N] [--store] [--out FILE]

Workers share one metadata server and a pool far too small for their prompts, so that slots are
constantly rewritten. Workers are killed and stopped, also in the middle of copies. The server is
killed, stopped, and started again with no descriptors left, with a clock that was set back, or
beside a second one; its ledger cannot grow, and clients show ledgers of earlier servers, or send
garbage. A verified retrieve is
one that brought something: each byte of its tokens is compared with what it must be, in blocks that
were poisoned before, and all other blocks with their poison. One seed gives the same decisions
again, but not the same timing.

With --store there is a Mooncake store as offload tier, too small as well, and the mishaps happen to
its master, its providers, its objects and the processes that workers use it through.

At the end a control is run: the same workers ignore the verdict on their
leases, or accept every object. It must see wrong bytes, or the zero above proves nothing."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..mooncake_store import missing
from ..results import Report, Row, load, none, row
from .chaos import Found, Soak
from .worker import Outcomes

RETRIEVES = 100_000
WORKERS = 10
PAUSE = 1.0
CONTROL_MISHAPS = {False: ("worker stopped",), True: ("objects damaged",)}
"""Without a store and with one."""
CONTROL_SECONDS = 120.0
SHOWN = 10


class Result(msgspec.Struct):
    """The result of one run, with its control's."""

    seed: int
    seconds: float
    outcomes: Outcomes
    counts: dict[str, int]
    stops: int
    workers_died: int
    servers_ended: int
    found: list[Found]
    control: Outcomes | None = None

    def counted(self) -> dict[str, int]:
        """Counts of retrieves, by outcome, and of mishaps, by kind."""
        return {**msgspec.to_builtins(self.outcomes), **self.counts, "stops": self.stops}


def run(
    retrieves: int = RETRIEVES,
    minutes: float = 0.0,
    seed: int = 1,
    workers: int = WORKERS,
    pause: float = PAUSE,
    store: bool = False,
) -> Result:
    """Run the soak until so many retrieves are verified, or for so many `minutes` instead. pause:
    seconds between two mishaps, on average. store: with a Mooncake store, to which the mishaps
    happen."""

    def over(outcomes: Outcomes, seconds: float) -> bool:
        return seconds > 60 * minutes if minutes else outcomes.verified >= retrieves

    with Soak(seed, workers, store=store) as soak:
        seconds = soak.run(over, pause)
        counts = dict(sorted(soak.mishaps.counts.items()))
        result = Result(
            seed,
            seconds,
            soak.outcomes,
            counts,
            soak.stops,
            soak.died,
            soak.servers_ended,
            soak.found,
        )
    result.control = run_control(seed, workers, store)
    return result


def run_control(seed: int, workers: int = WORKERS, store: bool = False) -> Outcomes:
    """Run workers that trust what they must not, until a byte is wrong or the time is up."""
    with Soak(seed, workers, CONTROL_MISHAPS[store], trusting=True, store=store) as soak:
        soak.run(
            lambda outcomes, passed: outcomes.wrong > 0 or passed > CONTROL_SECONDS,
            PAUSE / 4 if store else PAUSE,
        )
        return soak.outcomes


def rows(result: Result, asked: int, name: str = "soak") -> list[Row]:
    """The rows. asked: how many verified retrieves were asked for; 0: any number."""
    outcomes, control = result.outcomes, result.control
    what = json.dumps(result.counted() | {"seed": result.seed})
    what = f"{what} in {result.seconds:.0f} s; {load()}"
    asked = asked or outcomes.verified
    made = [
        row(f"{name}_retrieves", "retrieves", outcomes.verified, asked, what=what, at_least=1),
        none(f"{name}_wrong", "retrieves", outcomes.wrong, "with a wrong byte", outcomes.verified),
        none(
            f"{name}_ended",
            "processes",
            result.workers_died + result.servers_ended,
            "that nobody killed",
        ),
        none(f"{name}_raised", "calls", outcomes.raised, "that raised", outcomes.retrieves),
    ]
    if control is not None:
        what = f"where what must not be trusted is; {control.wrong_bytes} wrong bytes; reference 1"
        made.append(
            row(
                f"{name}_control_wrong",
                "retrieves",
                control.wrong,
                1,
                what=what,
                at_least=1,
                runs=control.verified,
            )
        )
    return made


def told(result: Result) -> str:
    """All counts, and descriptions of the first wrong bytes, as text."""
    counts = result.counted() | {
        "workers that ended": result.workers_died,
        "servers that ended": result.servers_ended,
    }
    if result.control is not None:
        counts |= {
            "control: verified": result.control.verified,
            "control: wrong": result.control.wrong,
        }
    lines = [f"{name:<31}{count:>15,}" for name, count in counts.items()]
    lines += [
        f"wrong at {each.at:g} s, after {', '.join(each.before)}: {each.wrong}"
        for each in result.found[:SHOWN]
    ]
    return "\n".join([*lines, f"{result.seconds:.0f} s; seed {result.seed}"])


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a byte was wrong, a call raised, a server or worker ended by itself, or the control saw
    no wrong byte.
    """
    parser = argparse.ArgumentParser(
        prog="benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--retrieves", type=int, default=RETRIEVES, help="verified ones (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="for so long, instead of so many retrieves"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument(
        "--store", action="store_true", help="with an offload tier, to which the mishaps happen"
    )
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if why := options.store and missing():
        parser.error(why)
    result = run(options.retrieves, options.minutes, options.seed, store=options.store)
    name = "soak_store" if options.store else "soak"
    made = rows(result, 0 if options.minutes else options.retrieves, name)
    if options.out:
        Report(options.out).add(made)
    print(told(result))
    return int(any(row.ok is False for row in made))


if __name__ == "__main__":
    raise SystemExit(main())
