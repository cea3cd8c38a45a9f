"""Are hits of real vLLM instances that share KV on two GPUs right, and how fast are they?

    python3 -m benchmarks.vllm_ttft --out FILE [--integration lmcache|vllm|inplace]
                                    [--only PART,...] [--scale full|tiny]

`--integration`: through LMCache and the plugin, through our own connector and a pool, or in place:
with the same, out of vLLM's own KV cache, without a pool. It needs vLLM, and LMCache for `lmcache`.
The model has the shape of Llama-3.1-8B and dummy weights, so nothing is downloaded. Parts run in
the order of `--only`. Each writes its rows as soon as it has them, and the others go on if one
fails. At the deadline whatever runs is ended. `--scale tiny` runs the same on the CPU, to check the
script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from .options import Measurement, names_of, parser
from .results import Row
from .vllm.fleet import Fleet, Run
from .vllm.instances import KINDS, joined
from .vllm.parts import equality, groups, latency, scheduling, versions
from .vllm.prompts import Prompts
from .vllm.scale import GIB, SCALES

OURS, POOL = ("vllm", "inplace"), ("lmcache", "vllm")
ALL = ("lmcache", *OURS)


class Part(NamedTuple):
    """Something to measure, and the instances it needs.

    ways: those of sharing that it is for, by what their rows begin with. cpu: whether it also runs
    on the CPU, where vLLM's MLA has no prefix cache."""

    instances: tuple[str, ...]
    run: Callable[[Run], list[Row]]
    ways: tuple[str, ...] = ALL
    cpu: bool = True


def _equal(run: Run) -> list[Row]:
    scale = run.fleet.scale
    return equality.equal(run, run.prompts.hits(scale.equal, scale.partial))


def _few(kind: str, cpu: bool = True) -> Part:
    """A part that compares a few hits of instances of a kind, and checks that their output depends
    on the prompt.

    With an EAGLE head vLLM's hash of a block covers the token after it, too. So prompts go on
    behind their last chunk there, or nobody would have that chunk.
    """

    def compared(run: Run) -> list[Row]:
        scale, goes_on = KINDS[kind].of(run.fleet.scale), bool(KINDS[kind].head)
        prompts = (groups.Ended if goes_on else Prompts)(scale, seed=run.prompts.seed)
        hits = prompts.hits(dict.fromkeys(scale.few, 3), 0 if goes_on else 4)
        run = run._replace(prompts=prompts)
        rows = equality.agreeing(run, kind) + equality.equal(run, hits, kind)
        return [*rows, *equality.sensitive(run, kind, 1)]

    return Part(_trio(kind), compared, OURS, cpu)


def _ttft(kind: str) -> Part:
    """A part that measures TTFT of instances of a kind with several ranks."""
    return Part(_trio(kind), lambda run: latency.first_token(run, kind), OURS, cpu=False)


def _groups(kind: str, cpu: bool = True) -> Part:
    """A part for a model with several block tables, which is shared through a pool."""
    return Part(_trio(kind), lambda run: groups.measure(run, kind), ("vllm",), cpu)


def _trio(kind: str) -> tuple[str, ...]:
    return tuple(joined(kind, who) for who in ("alone", "a", "b"))


PAIR = _trio("")
PARTS: dict[str, Part] = {
    "scheduler": Part(("a", "timed"), scheduling.scheduler_time, OURS),
    "ttft": Part(PAIR, latency.first_token),
    "agreeing": Part(PAIR, equality.agreeing),
    "sensitive": Part(("alone",), equality.sensitive),
    "flipped": Part(PAIR, equality.flipped, ("inplace",)),
    "equal": Part(PAIR, _equal),
    "restart": Part(PAIR, equality.restart, POOL),
    "tpot": Part(("a", "b"), latency.decoding),
    "miss": Part(("alone", "a"), latency.miss),
    "fp8": _few("fp8"),
    "mla": _few("mla", cpu=False),
    "ngram": _few("ngram"),
    "gemma3": _groups("gemma3"),
    "gptoss": _groups("gptoss"),
    "tp2": _few("tp2", cpu=False),
    # vLLM 0.32's Mamba-2 kernels for CPUs end with an IndexError if there is a prefix cache.
    "state_mamba2": _groups("state_mamba2", cpu=False),
    "state_conv": _groups("state_conv"),
    "state_gdn": _groups("state_gdn"),
    "short": Part(("busy_alone", "busy_a"), latency.short_tax, OURS),
    "sparse": _few("sparse", cpu=False),
    "sparse_fp8": _few("sparse_fp8", cpu=False),
    "head": _few("head", cpu=False),
    "weights": Part(_trio(versions.KIND), versions.measure, OURS),
    "tp2_ttft": _ttft("tp2"),
    "pp2": _few("pp2", cpu=False),
    "pp2_ttft": _ttft("pp2"),
    "three": Part(("a", "b", "c", "d"), latency.three_readers, OURS),
}
"""In the order in which they run. A part's number is the seed of its prompts, so new parts go to
the end. Some are not for sharing in place: `restart`, since an instance's KV goes with it, and
models with several block tables."""
APART = (
    ("tp2", "tp2_ttft"),
    ("pp2", "pp2_ttft"),
    ("fp8", "mla", "ngram"),
    ("sparse", "sparse_fp8", "head"),
    ("gemma3", "gptoss"),
    groups.STATES,
    ("short",),
    ("weights",),
    ("three",),
)
"""Groups of parts whose instances start after all others have ended; those of one group start
together, on the CPU one at a time.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring. Returns 1 if a row missed its limit or a part had no rows."""
    options = _options(arguments)
    made = Measurement(options)
    scale, way = SCALES[options.scale], options.integration
    for memory in ("kv", "pool"):
        if (gib := getattr(options, f"{memory}_gib")) and not scale.cpu:
            scale = msgspec.structs.replace(scale, **{f"{memory}_bytes": int(gib * GIB)})
    names = [name for name in options.only or PARTS if way in PARTS[name].ways]
    skipped = [name for name in names if scale.cpu and not PARTS[name].cpu]
    names = [name for name in names if name not in skipped]
    print("".join(f"{name}: skipped, needs GPUs\n" for name in skipped), end="", flush=True)
    with Fleet(scale, made.folder, options.cache, dict(options.set), way) as fleet:
        for index, name in enumerate(names):
            prompts = Prompts(fleet.scale, seed=list(PARTS).index(name))
            with made.part(name):
                _arrange(fleet, names[index:])
                print(f"{name}: {made.clock.spent:.0f} s", flush=True)
                made.clock.check(5)
                made.report.add(PARTS[name].run(Run(fleet, made.clock, prompts, options.rounds)))
                if fleet.in_place:
                    made.report.add([fleet.copied()])
    return made.end()


def _arrange(fleet: Fleet, names: Sequence[str]) -> None:
    """Start what the coming parts need, up to the next part that needs the GPUs alone; end the
    instances that none of them needs.
    """
    apart = [(name,) for group in APART for name in group] if fleet.scale.cpu else APART
    group = next((group for group in apart if names[0] in group), None)
    rest = {name for group in apart for name in group}
    now = [name for name in names if (name in group if group else name not in rest)]
    needed = {instance for name in now for instance in PARTS[name].instances}
    fleet.end(fleet.running - needed)
    fleet.start(sorted(needed))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("vllm_ttft", __doc__, 520.0)
    option = made.add_argument
    option("--only", type=names_of(PARTS), help=f"of {', '.join(PARTS)}")
    option("--integration", choices=ALL, default="lmcache", help="rows begin with it")
    option("--scale", choices=SCALES, default="full")
    option("--pool-gib", type=float, help="of each instance, lent to the pool")
    option("--kv-gib", type=float, help="vLLM's KV cache of each instance; an owner's is twice it")
    option("--rounds", type=int, default=11, help="prompts of each length in `ttft`")
    options = made.parse_args(arguments)
    way = options.integration
    if strange := [name for name in options.only or () if way not in PARTS[name].ways]:
        made.error(f"{', '.join(strange)}: not for {way}")
    return options


if __name__ == "__main__":
    sys.exit(main())
