"""Real vLLM instances on two GPUs that share KV through vcache: is it right, and how fast is it?

    python3 -m benchmarks.vllm_ttft --out FILE [--door lmcache|vllm] [--only PART,...] [--scale full|quick|tiny]

`--door`: through LMCache and the plugin, or through our own connector. Needs vLLM, and LMCache for its door and for comparisons;
the model has the shape of Llama-3.1-8B and dummy weights, so nothing is downloaded. Each part writes its rows as soon as it has
them; a part that fails does not cost the others theirs; at the deadline what runs is ended.
`--scale tiny` runs the same on the CPU, for the sake of the script. `--plot PICTURE` draws the file given by `--out` and measures nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from .results import Row
from .vllm import equality, failures, latency, offload, scheduling
from .vllm.fleet import Fleet
from .vllm.instances import KINDS
from .vllm.prompts import Prompts
from .vllm.report import Clock, Report
from .vllm.scale import SCALES

DOORS = ("lmcache", "vllm")


class Run(NamedTuple):
    """What a part works with. prompts: how many `equal` takes, 0: all of the scale's."""

    fleet: Fleet
    clock: Clock
    source: Prompts
    prompts: int
    rounds: int
    variants: tuple[str, ...]


class Part(NamedTuple):
    """Something to measure, the instances it needs, and about how many seconds on two H200s once they are up.

    doors: which it is for. cpu: whether it runs on the CPU too; vLLM's MLA there has no prefix cache.
    """

    instances: tuple[str, ...]
    seconds: int
    run: Callable[[Run], list[Row]]
    doors: tuple[str, ...] = DOORS
    cpu: bool = True


def _equal(run: Run) -> list[Row]:
    scale = run.fleet.scale
    hits = run.source.hits(scale.equal, scale.partial)
    return equality.equal(run.fleet, run.clock, hits[: run.prompts or None], run.source)


def _few(run: Run, kind: str) -> list[Row]:
    """Hits of instances of a kind, and, but for eager ones of the plain model, whether their output depends on the prompt at all."""
    scale = KINDS[kind].of(run.fleet.scale)
    source = Prompts(scale, seed=run.source.seed)
    hits = source.hits(dict.fromkeys(scale.few, 3), 4)
    rows = equality.equal(run.fleet, run.clock, hits, source, kind)
    rows += equality.agreeing(run.fleet, source, kind)
    return rows if kind == "eager" else [*rows, *equality.sensitive(run.fleet, source, kind, 1)]


def _trio(kind: str) -> tuple[str, ...]:
    return (f"{kind}_alone", f"{kind}_a", f"{kind}_b")


def _miss(run: Run) -> list[Row]:
    short = run.rounds < 5
    counts = {"1k": 5 if short else 25, "4k": 5 if short else 31, "16k": 3 if short else 11}
    return latency.miss(run.fleet, run.clock, run.source, counts)


PAIR = ("alone", "a", "b")
PARTS: dict[str, Part] = {
    "sensitive": Part(("alone",), 12, lambda run: equality.sensitive(run.fleet, run.source)),
    "agreeing": Part(PAIR, 6, lambda run: equality.agreeing(run.fleet, run.source)),
    "flipped": Part(PAIR, 6, lambda run: equality.flipped(run.fleet, run.source)),
    "ttft": Part(PAIR, 65, lambda run: latency.first_token(run.fleet, run.clock, run.source, run.rounds, run.variants)),
    "miss": Part(("alone", "a"), 30, _miss),
    "tpot": Part(("a", "b"), 35, lambda run: latency.decoding(run.fleet, run.clock, run.source)),
    "equal": Part(PAIR, 150, _equal),
    "stock": Part(("alone", "stock"), 20, lambda run: equality.stock(run.fleet, run.clock, run.source), ("lmcache",)),
    "restart": Part(PAIR, 60, lambda run: equality.restart(run.fleet, run.source)),
    "scheduler": Part(
        ("a", "timed"), 40, lambda run: scheduling.scheduler_time(run.fleet, run.clock, run.source), doors=("vllm",)
    ),
    "eager": Part(_trio("eager"), 20, lambda run: _few(run, "eager")),
    "tp2": Part(("tp2",), 20, lambda run: equality.tensor_parallel(run.fleet, run.source), cpu=False),
    "failures": Part(_trio("failing"), 40, lambda run: failures.failures(run.fleet, run.clock, run.source)),
    "fp8": Part(_trio("fp8"), 20, lambda run: _few(run, "fp8"), doors=("vllm",)),
    "mla": Part(_trio("mla"), 15, lambda run: _few(run, "mla"), doors=("vllm",), cpu=False),
    "below": Part(_trio(offload.EAGER), 40, lambda run: offload.equal(run.fleet, run.clock, run.source)),
    "below_ttft": Part(_trio("below"), 30, lambda run: offload.first_token(run.fleet, run.clock, run.source)),
    "ngram": Part(_trio("ngram"), 20, lambda run: _few(run, "ngram"), doors=("vllm",)),
}
"""In the order they are run in."""
APART = (("eager",), ("tp2",), ("failures",), ("below",), ("below_ttft",), ("fp8", "mla", "ngram"))
"""Parts whose instances start when all that others need is gone; those of one group start together, on the CPU each alone."""
GRACE = 20
"""Seconds after the deadline at which whatever still runs is ended, and the rows there are stay."""


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text. 1 if a row missed its limit or a part had no rows."""
    options = _options(arguments)
    if options.plot:
        from .vllm.plot import plot

        plot(options.out, options.plot)
        return 0
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGALRM, _end)
    signal.alarm(int(options.seconds) + GRACE)
    scale = SCALES[options.scale]
    clock, report = Clock(options.seconds), Report(options.out, options.commit, options.suffix)
    names = [name for name in PARTS if name in (options.only or PARTS) and options.door in PARTS[name].doors]
    skipped = [name for name in names if scale.cpu and not PARTS[name].cpu]
    names = [name for name in names if name not in skipped]
    variants = ("vcache",) + (() if options.without_mp or scale.cpu else ("mp",)) + (("lmcache",) if options.with_lmcache else ())
    settings = dict(setting.split("=", 1) for setting in options.set)
    failed = []
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vcache-vllm-"))
    with Fleet(scale, folder, options.cache, options.in_process, settings, options.door, options.isolated) as fleet:
        print(f"logs in {fleet.folder}", flush=True)
        for name in skipped:
            print(f"{name}: skipped, needs GPUs", flush=True)
        for index, name in enumerate(names):
            source = Prompts(fleet.scale, seed=sorted(PARTS).index(name) + options.seed * 100)
            run = Run(fleet, clock, source, options.prompts, options.rounds, variants)
            try:
                _arrange(fleet, names[index:], variants)
                print(f"{name}: {clock.spent:.0f} s", flush=True)
                clock.check(5)
                report.add(PARTS[name].run(run))
            except Exception as error:  # noqa: BLE001 the other parts' rows count
                failed.append(name)
                traceback.print_exc()
                print(f"{name}: FAILED after {clock.spent:.0f} s: {type(error).__name__}: {error}", flush=True)
    signal.alarm(0)
    print(report.table())
    print(f"{clock.spent:.0f} s; {len(report.rows)} rows{'; failed: ' + ', '.join(failed) if failed else ''}", flush=True)
    return 1 if failed or any(row.ok is False for row in report.rows.values()) else 0


def _arrange(fleet: Fleet, names: Sequence[str], variants: Sequence[str]) -> None:
    """Start at once all that the parts to come need, up to the next that wants the GPUs to itself; end what none of them does."""
    apart = [(name,) for group in APART for name in group] if fleet.scale.cpu else APART
    group = next((group for group in apart if names[0] in group), None)
    rest = {name for group in apart for name in group}
    now = [name for name in names if (name in group if group else name not in rest)]
    needed = {instance for name in now for instance in PARTS[name].instances}
    if "ttft" in now:
        needed |= {instance for variant in variants for instance in latency.SIDES[variant]}
        needed |= {"mp_server"} if "mp" in variants else set()
    fleet.end(fleet.running - needed - {"memory"})
    fleet.start(sorted(needed - {"mp_server"}))


def _end(number: int, frame: object) -> NoReturn:
    """SIGTERM becomes an exception, so that children are killed on the way out."""
    sys.exit(128 + number)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm_ttft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file; one that is there is continued")
    parser.add_argument("--only", type=_parts, help=f"parts, with commas between them; of {', '.join(PARTS)}")
    parser.add_argument(
        "--door", choices=DOORS, default="lmcache", help="how vcache's instances come to the pool; rows begin with it"
    )
    parser.add_argument(
        "--with-lmcache", action="store_true", help="of --door vllm: LMCache's instances in `ttft` too, to compare"
    )
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--quick", dest="scale", action="store_const", const="quick", help="the same as --scale quick")
    parser.add_argument("--tiny", dest="scale", action="store_const", const="tiny", help="the same as --scale tiny")
    parser.add_argument("--prompts", type=int, default=0, help="how many prompts `equal` takes")
    parser.add_argument("--rounds", type=int, default=11, help="prompts of each length in `ttft`")
    parser.add_argument("--seconds", type=float, default=520.0, help="when to stop, whatever is left")
    parser.add_argument("--seed", type=int, default=0, help="other prompts")
    parser.add_argument("--commit", default="", help="the commit measured, where git cannot tell")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of vcache, such as vcache.pool.max_ctas=32"
    )
    parser.add_argument("--suffix", default="", help="at the end of every case's name, for a second run with other settings")
    parser.add_argument("--without-mp", action="store_true", help="leave LMCache's MP server out of `ttft`")
    parser.add_argument("--in-process", action="store_true", help="vLLM's engine core in the instance's own process")
    parser.add_argument("--isolated", action="store_true", help="each instance sees the GPU it computes on and no other")
    parser.add_argument("--logs", type=Path, help="where logs and settings go; default: a new folder")
    parser.add_argument(
        "--cache", type=Path, default=Path("/tmp/vcache-vllm-cache"), help="vLLM's compiled code, for the next run"
    )
    parser.add_argument("--plot", type=Path, metavar="PICTURE", help="draw --out into a .svg or .png")
    options = parser.parse_args(arguments)
    if options.plot and not options.out:
        parser.error("--plot draws the file given by --out")
    if options.with_lmcache and options.door == "lmcache":
        parser.error("--with-lmcache compares our own connector with LMCache: add --door vllm")
    strange = [name for name in options.only or () if options.door not in PARTS[name].doors]
    if strange:
        parser.error(f"{', '.join(strange)}: not for --door {options.door}")
    return options


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
