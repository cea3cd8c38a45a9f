"""Are hits of real vLLM instances that share KV on two GPUs right, and how fast are they?

    python3 -m benchmarks.vllm_ttft --out FILE [--integration lmcache|vllm|inplace|both|behind]
                                    [--only PART,...] [--scale full|beside|tiny]

`--integration`: through LMCache and the plugin, through our own connector and a pool, or in place:
with the same, out of vLLM's own KV cache, without a pool; `both`: in place beside LMCache's server;
`behind`: out of LMCache's server, beside us. It needs vLLM, and LMCache for all but `vllm` and
`inplace`.
Part `decode` wants one GPU, and `--kv-gib 6`.
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

from vcache_backend.prove.prompts import ANY, Prompts

from .options import Measurement, names_of, parser
from .results import Row
from .vllm.fleet import Fleet, Run
from .vllm.instances import GIB, KINDS, SCALES, joined
from .vllm.parts import equality, latency, scheduling
from .vllm.parts.scheduling import ARMS

OURS = ("vllm", "inplace")
BESIDE = "both", "behind"
ALL = ("lmcache", *OURS, *BESIDE)


class Part(NamedTuple):
    """Something to measure, and the instances it needs.

    ways: those of sharing that it is for, by what their rows begin with. cpu: whether it also runs
    on the CPU, where vLLM's MLA has no prefix cache. apart: its instances start after those of
    other parts have ended."""

    instances: tuple[str, ...]
    run: Callable[[Run], list[Row]]
    ways: tuple[str, ...] = ALL
    cpu: bool = True
    apart: str = ""


def _equal(run: Run) -> list[Row]:
    scale = run.fleet.scale
    return equality.equal(run, run.prompts.hits(scale.equal, scale.partial))


def _few(kind: str, apart: str, ways: tuple[str, ...] = OURS, cpu: bool = True) -> Part:
    """A part that compares a few hits of instances of a kind, and checks that their output depends
    on the prompt. apart: parts with the same start together.
    """

    def compared(run: Run) -> list[Row]:
        scale, in_place = KINDS[kind].of(run.fleet.scale), run.fleet.in_place
        prompts = Prompts(*scale.units, run.prompts.seed, KINDS[kind].tail)
        run = run._replace(prompts=prompts)
        if KINDS[kind].few:
            hits = prompts.hits(dict.fromkeys(scale.few, 2), 2)
            hits = [hit._replace(cached=ANY) for hit in hits]
        elif in_place:
            # Blocks of states are long.
            hits = prompts.ends([*scale.few[1:], 2 * scale.few[-1]])
        else:
            # Through a pool those of a model with windows need their chunk's end, which a partial
            # hit may not have.
            parting = 0 if "layer_types" in scale.model else 4
            hits = prompts.hits(dict.fromkeys(scale.few, 3), parting)
        rows = equality.agreeing(run, kind) + equality.equal(run, hits, kind)
        rows += equality.flipped(run, kind) if in_place else []
        return [*rows, *equality.sensitive(run, kind, 1)]

    return Part(_trio(kind), compared, ways, cpu, apart)


def _timed(model: str) -> Part:
    """The time to first token of a model with several block tables."""
    kind = f"{model}_graphs"

    def timed(run: Run) -> list[Row]:
        prompts = Prompts(*KINDS[kind].of(run.fleet.scale).units, run.prompts.seed)
        return latency.first_token(run._replace(prompts=prompts), kind)

    return Part(_trio(kind), timed, ("inplace",), KINDS[kind].ranks == 1, "graphs")


def _trio(kind: str = "") -> tuple[str, ...]:
    return tuple(joined(kind, who) for who in ("alone", "a", "b"))


PARTS: dict[str, Part] = {
    "scheduler": Part(("a", "timed"), scheduling.scheduler_time, OURS),
    "ttft": Part(_trio(), latency.first_token),
    "ttft_gpt_oss": _timed("gpt_oss"),
    "ttft_gemma3": _timed("gemma3"),
    "agreeing": Part(_trio(), equality.agreeing),
    "sensitive": Part(("alone",), equality.sensitive),
    "flipped": Part(_trio(), equality.flipped, ("inplace", "both")),
    "equal": Part(_trio(), _equal),
    "miss": Part(("alone", "a"), latency.miss),
    "fp8": _few("fp8", "modes"),
    "mla": _few("mla", "modes", cpu=False),
    "ngram": _few("ngram", "modes"),
    # Several block tables, the last ones' with states.
    "gemma3": _few("gemma3", "windows"),
    "gpt_oss": _few("gpt_oss", "windows"),
    "lfm2": _few("lfm2", "windows", ("vllm",)),
    "conv": _few("conv", "states", ("inplace",)),
    "mamba2": _few("mamba2", "states", ("inplace",), cpu=False),
    "gdn": _few("gdn", "states", ("inplace",)),
    "v4": _few("v4", "v4", ("inplace",), cpu=False),
    "tp2": _few("tp2", "tp2", cpu=False),
    "decode": Part(tuple(ARMS.values()), scheduling.decode_steps, ("inplace",), apart="decode"),
    "short": Part(("busy_alone", "busy_a"), latency.short_tax, OURS, apart="short"),
    "tp2_gpt_oss": _few("tp2_gpt_oss_graphs", "graphs", ("inplace",), cpu=False),
    "ttft_tp2_gpt_oss": _timed("tp2_gpt_oss"),
}
"""In the order in which they run. A part's number is the seed of its prompts."""


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
            prompts = Prompts(*fleet.scale.units, seed=list(PARTS).index(name))
            with made.part(name):
                _arrange(fleet, names[index:])
                print(f"{name}: {made.clock.spent:.0f} s", flush=True)
                made.clock.check(5)
                made.report.add(PARTS[name].run(Run(fleet, made.clock, prompts, options.rounds)))
                if fleet.in_place:
                    made.report.add([fleet.copied()])
    return made.end()


def _arrange(fleet: Fleet, names: Sequence[str]) -> None:
    """Start what the next part needs, with those that may run beside it; end the instances that
    none of them needs. On the CPU those apart start one at a time.
    """
    apart = PARTS[names[0]].apart
    now = [name for name in names if PARTS[name].apart == apart]
    now = now[:1] if apart and fleet.scale.cpu else now
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
