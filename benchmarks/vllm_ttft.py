"""Are hits of real vLLM instances that share KV on two GPUs right, and how fast are they?

    python3 -m benchmarks.vllm_ttft --out FILE [--integration lmcache|vllm [--share in_place]]
                                    [--only PART,...] [--scale full|tiny]

`--integration`: through LMCache and the plugin, or through our own connector. `--share in_place`:
out of vLLM's own KV cache, without a pool. It needs vLLM, and LMCache for `lmcache` and for
comparisons. The model has the shape of Llama-3.1-8B and dummy weights, so nothing is downloaded.
Parts run in the order of `--only`. Each writes its rows as soon as it has them, and the others go
on if one fails. At the deadline whatever runs is ended. `--scale tiny` runs the same on the CPU, to
check the script."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from .results import Clock, Report, Row
from .vllm import death, equality, groups, latency, offload, pd, scheduling
from .vllm.environment import container, on_one_gpu
from .vllm.fleet import Fleet
from .vllm.instances import KINDS
from .vllm.prompts import Prompts
from .vllm.scale import GIB, SCALES

INTEGRATIONS = ("lmcache", "vllm")
GRACE = 20
"""Seconds after the deadline at which whatever still runs is ended. The rows so far are kept."""


class Run(NamedTuple):
    """What a part works with. prompts: how many prompts `equal` takes; 0: all of the scale's."""

    fleet: Fleet
    clock: Clock
    source: Prompts
    prompts: int
    rounds: int
    variants: tuple[str, ...]


class Part(NamedTuple):
    """Something to measure, the instances it needs, and about how many seconds on two H200s once
    they are up.

    of: the integrations it is for. cpu: whether it also runs on the CPU, where vLLM's MLA has no
    prefix cache, and eager pipelines have no buffers between their stages. in_place, pool: whether
    it applies to that way of sharing."""

    instances: tuple[str, ...]
    seconds: int
    run: Callable[[Run], list[Row]]
    of: tuple[str, ...] = INTEGRATIONS
    cpu: bool = True
    in_place: bool = True
    pool: bool = True


def _equal(run: Run) -> list[Row]:
    scale = run.fleet.scale
    hits = run.source.hits(scale.equal, scale.partial)
    return equality.equal(run.fleet, run.clock, hits[: run.prompts or None], run.source)


def _few(
    kind: str,
    seconds: int,
    of: tuple[str, ...] = ("vllm",),
    cpu: bool = True,
    then: Callable[[Run], list[Row]] | None = None,
    where: Callable[[], str] = lambda: "",
) -> Part:
    """A part that compares a few hits of instances of a kind and, except for the eager plain model,
    checks that their output depends on the prompt. then: measured instead of that check. where: who
    stores the chunks, in words."""

    def run(run: Run) -> list[Row]:
        scale = KINDS[kind].of(run.fleet.scale)
        source = Prompts(scale, seed=run.source.seed)
        rows = equality.agreeing(run.fleet, source, kind)
        rows += equality.equal(
            run.fleet,
            run.clock,
            source.hits(dict.fromkeys(scale.few, 3), 4),
            source,
            kind,
            where=where(),
        )
        if then is not None:
            return [*rows, *then(run)]
        return rows if kind == "eager" else [*rows, *equality.sensitive(run.fleet, source, kind, 1)]

    return Part(_trio(kind), seconds, run, of, cpu)


def _tp2_ttft(run: Run) -> list[Row]:
    """TTFT with tensor parallelism. No rows if the ranks take turns on one GPU, whose cost would
    hide the rest.
    """
    if on_one_gpu() and not run.fleet.scale.cpu:
        return []
    return latency.first_token(run.fleet, run.clock, run.source, run.rounds, kind="tp2")


def _restart(run: Run) -> list[Row]:
    """`restart` for two instances of a model whose layers lie on two GPUs."""
    return [] if run.fleet.in_place else equality.restart(run.fleet, run.source, "pp2")


def _groups(kind: str, seconds: int, cpu: bool = True) -> Part:
    """A part for a model with several block tables, which is shared through a pool."""

    def run(run: Run) -> list[Row]:
        return groups.measure(run.fleet, run.clock, run.source, kind, run.rounds)

    return Part(_trio(kind), seconds, run, ("vllm",), cpu, in_place=False)


def _apart() -> str:
    """Who stores the chunks, in words, when instances share only the socket's folder."""
    own = (
        "in namespaces of pids, network and IPC of its own"
        if container()
        else "not in such, which are forbidden here"
    )
    return f"stored by an instance that sees another GPU; each is {own}"


def _trio(kind: str) -> tuple[str, ...]:
    return (f"{kind}_alone", f"{kind}_a", f"{kind}_b")


def _miss(run: Run) -> list[Row]:
    short = run.rounds < 5
    counts = {"1k": 5 if short else 25, "4k": 5 if short else 31, "16k": 3 if short else 11}
    return latency.miss(run.fleet, run.clock, run.source, counts)


PAIR = ("alone", "a", "b")
OURS = ("vllm",)
PARTS: dict[str, Part] = {
    "scheduler": Part(
        ("a", "timed"),
        40,
        lambda run: scheduling.scheduler_time(run.fleet, run.clock, run.source),
        OURS,
    ),
    "ttft": Part(
        PAIR,
        85,
        lambda run: latency.first_token(run.fleet, run.clock, run.source, run.rounds, run.variants),
    ),
    "agreeing": Part(PAIR, 6, lambda run: equality.agreeing(run.fleet, run.source)),
    "sensitive": Part(("alone",), 12, lambda run: equality.sensitive(run.fleet, run.source)),
    "flipped": Part(PAIR, 6, lambda run: equality.flipped(run.fleet, run.source)),
    "equal": Part(PAIR, 150, _equal),
    "restart": Part(PAIR, 60, lambda run: equality.restart(run.fleet, run.source), in_place=False),
    "tpot": Part(("a", "b"), 35, lambda run: latency.decoding(run.fleet, run.clock, run.source)),
    "miss": Part(("alone", "a"), 30, _miss),
    "pd": Part(
        ("producer", "consumer"),
        30,
        lambda run: pd.first_token(run.fleet, run.clock, run.source, run.rounds),
        OURS,
    ),
    "death": Part(
        ("a", "b"),
        80,
        lambda run: death.owner_death(run.fleet, run.clock, run.source),
        OURS,
        pool=False,
    ),
    "eager": _few("eager", 20, INTEGRATIONS),
    "isolated": _few("isolated", 20, then=lambda run: [], where=_apart),
    "below": Part(
        _trio(offload.EAGER),
        40,
        lambda run: offload.equal(run.fleet, run.clock, run.source),
        OURS,
        in_place=False,
    ),
    "fp8": _few("fp8", 20),
    "mla": _few("mla", 15, cpu=False),
    "ngram": _few("ngram", 20),
    "gemma3": _groups("gemma3", 90),
    "gptoss": _groups("gptoss", 90),
    "tp2": _few("tp2", 60, cpu=False, then=_tp2_ttft),
    "pp2": _few("pp2", 60, cpu=False, then=_restart),
    # vLLM 0.32's Mamba-2 kernels for CPUs end with an IndexError if there is a prefix cache.
    "state_mamba2": _groups("state_mamba2", 90, cpu=False),
    "state_conv": _groups("state_conv", 90),
    "state_gdn": _groups("state_gdn", 90),
    "state_graphs": _groups("state_graphs", 90, cpu=False),
    "short": Part(
        ("busy_alone", "busy_a"),
        160,
        lambda run: latency.short_tax(run.fleet, run.clock, run.source),
        OURS,
    ),
}
"""In the order in which they run. A part's number is the seed of its prompts, so new parts go to
the end. Some are not for sharing in place: `restart`, since an instance's KV goes with it; `below`,
since without a pool nothing is offloaded; and models with several block tables."""
APART = (
    ("pd",),
    ("eager",),
    ("isolated",),
    ("tp2",),
    ("pp2",),
    ("below",),
    ("fp8", "mla", "ngram"),
    ("gemma3", "gptoss"),
    groups.STATES,
    ("state_graphs",),
    ("short",),
)
"""Groups of parts whose instances start after all others have ended; those of one group start
together, on the CPU one at a time.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring. Returns 1 if a row missed its limit or a part had no rows."""
    options = _options(arguments)
    end_in_time(options.seconds)
    scale = SCALES[options.scale]
    if options.pool_gib and not scale.cpu:
        scale = msgspec.structs.replace(scale, pool_bytes=int(options.pool_gib * GIB))
    if options.kv_gib and not scale.cpu:
        scale = msgspec.structs.replace(scale, kv_bytes=int(options.kv_gib * GIB))
    scale = msgspec.structs.replace(scale, compiled=not options.graphs_only)
    clock, report = Clock(options.seconds), Report(options.out, options.commit, options.suffix)
    in_place = options.share == "in_place"
    names = [name for name in options.only or PARTS if _is_for(name, options.integration, in_place)]
    skipped = [name for name in names if scale.cpu and not PARTS[name].cpu]
    names = [name for name in names if name not in skipped]
    print("".join(f"{name}: skipped, needs GPUs\n" for name in skipped), end="", flush=True)
    variants = ("vcache", "lmcache") if options.with_lmcache else ("vcache",)
    more = dict(setting.split("=", 1) for setting in options.set)
    failed = []
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vcache-vllm-"))
    with Fleet(
        scale, folder, options.cache, more, options.integration, options.isolated, in_place
    ) as fleet:
        print(f"logs in {fleet.folder}", flush=True)
        for index, name in enumerate(names):
            source = Prompts(fleet.scale, seed=list(PARTS).index(name))
            try:
                _arrange(fleet, names[index:], variants)
                print(f"{name}: {clock.spent:.0f} s", flush=True)
                clock.check(5)
                report.add(
                    PARTS[name].run(
                        Run(fleet, clock, source, options.prompts, options.rounds, variants)
                    )
                )
                if in_place:
                    report.add([fleet.copied()])
            except Exception as error:  # noqa: BLE001 the other parts' rows count
                failed.append(name)
                traceback.print_exc()
                print(
                    f"{name}: FAILED after {clock.spent:.0f} s: {type(error).__name__}: {error}",
                    flush=True,
                )
    signal.alarm(0)
    report.add(groups.together(list(report.rows.values())))
    print(report.table())
    print(
        (
            f"{clock.spent:.0f} s; {len(report.rows)} "
            f"rows{'; failed: ' + ', '.join(failed) if failed else ''}"
        ),
        flush=True,
    )
    return int(bool(failed) or report.missed)


def _arrange(fleet: Fleet, names: Sequence[str], variants: Sequence[str]) -> None:
    """Start what the coming parts need, up to the next part that needs the GPUs alone; end the
    instances that none of them needs.
    """
    apart = [(name,) for group in APART for name in group] if fleet.scale.cpu else APART
    group = next((group for group in apart if names[0] in group), None)
    rest = {name for group in apart for name in group}
    now = [name for name in names if (name in group if group else name not in rest)]
    needed = {instance for name in now for instance in PARTS[name].instances}
    if "ttft" in now:
        needed |= {instance for variant in variants for instance in latency.SIDES[variant]}
    fleet.end(fleet.running - needed - {"memory"})
    fleet.start(sorted(needed))


def _is_for(name: str, integration: str, in_place: bool) -> bool:
    return integration in PARTS[name].of and (
        PARTS[name].in_place if in_place else PARTS[name].pool
    )


def end_in_time(seconds: float) -> None:
    """SIGTERM, and the deadline with a reserve, become an exception, so that children are killed on
    the way out.
    """

    def end(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, end)
    signal.alarm(int(seconds) + GRACE)


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of names with commas between them."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(
                f"no {', '.join(unknown)}; there are {', '.join(known)}"
            )
        return names

    return parse


def common_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add the options that all measurements of vLLM have."""
    parser.add_argument("--out", type=Path, help="result file; one that is there is continued")
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="when to stop, whatever is left (default: %(default)g)",
    )
    parser.add_argument("--commit", default="", help="the commit measured, where git cannot tell")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of vcache, such as vcache.pool.max_ctas=32",
    )
    parser.add_argument(
        "--logs", type=Path, help="where logs and settings go; default: a new folder"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("/tmp/vcache-vllm-cache"),
        help="vLLM's compiled code and the models, for the next run",
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vllm_ttft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_options(parser, 520.0)
    parser.add_argument(
        "--only",
        type=names_of(PARTS),
        help=f"parts, with commas between them; of {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--integration", choices=INTEGRATIONS, default="lmcache", help="rows begin with it"
    )
    parser.add_argument(
        "--share",
        choices=("pool", "in_place"),
        default="pool",
        help="what connector.share is; in_place: rows begin with inplace",
    )
    parser.add_argument(
        "--with-lmcache",
        action="store_true",
        help="of --integration vllm: LMCache's instances in `ttft` too, to compare",
    )
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument(
        "--pool-gib", type=float, help="what each instance lends to the pool; default: the scale's"
    )
    parser.add_argument(
        "--kv-gib",
        type=float,
        help="vLLM's KV cache of each instance, twice as much of who computes in place; "
        "default: the scale's. A load in the step reads at "
        "most an eighth of its owner's",
    )
    parser.add_argument(
        "--graphs-only",
        action="store_true",
        help="CUDA graphs of decode steps, and nothing compiled",
    )
    parser.add_argument("--prompts", type=int, default=0, help="how many prompts `equal` takes")
    parser.add_argument(
        "--rounds",
        type=int,
        default=11,
        help="prompts of each length in `ttft` and of each kind in `pd`",
    )
    parser.add_argument(
        "--suffix",
        default="",
        help="at the end of every case's name, for a second run with other settings",
    )
    parser.add_argument(
        "--isolated",
        action="store_true",
        help="each instance sees the GPU it computes on and no other",
    )
    options = parser.parse_args(arguments)
    if options.with_lmcache and options.integration == "lmcache":
        parser.error(
            "--with-lmcache compares our own connector with LMCache: add --integration vllm"
        )
    in_place = options.share == "in_place"
    if in_place and (options.integration == "lmcache" or options.with_lmcache):
        parser.error(
            "--share in_place is of our connector alone: add --integration vllm, take out "
            "--with-lmcache"
        )
    strange = [
        name for name in options.only or () if not _is_for(name, options.integration, in_place)
    ]
    if strange:
        parser.error(
            f"{', '.join(strange)}: not for --integration {options.integration}, --share "
            f"{options.share}"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
