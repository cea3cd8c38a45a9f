"""Are hits of real vLLM instances that share KV on two GPUs right, and how fast are they?

    python3 -m benchmarks.vllm_ttft --out FILE [--only PART,...] [--scale full|beside|tiny]
                                    [--integration lmcache|vllm|inplace|saved|both|behind]

`--integration`: through LMCache and the plugin, through our own connector and a pool, or in place:
with the same, out of vLLM's own KV cache, without a pool; `saved`: in place, out of a pool in host
memory that keeps what KV caches lose; `both`: in place beside LMCache's server; `behind`: out of
LMCache's server, beside us. It needs vLLM, and LMCache for all but `vllm`, `inplace` and `saved`.
Part `decode` wants one GPU, and `--kv-gib 6`.
The model has the shape of Llama-3.1-8B and dummy weights, so nothing is downloaded. Parts run in
the order of `--only`. Each writes its rows as soon as it has them, and the others go on if one
fails. At the deadline whatever runs is ended. `--scale tiny` runs the same on the CPU, to check the
script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from .options import Measurement, names_of, parser
from .results import Row
from .vllm.fleet import Fleet, Run
from .vllm.instances import GIB, KINDS, SCALES, joined
from .vllm.parts import equality, latency, scheduling
from .vllm.parts.scheduling import ARMS

OURS = ("vllm", "inplace")
BESIDE = "both", "behind"
ALL = ("lmcache", *OURS, "saved", *BESIDE)


class Part(NamedTuple):
    """Something to measure, and the instances it needs.

    kind: of them. who: they, by the end of their names. ways: those of sharing that it is for, by
    what their rows begin with. cpu: whether it also runs on the CPU, where vLLM's MLA has no prefix
    cache. apart: its instances start after those of other parts have ended, with others of the
    same."""

    run: Callable[[Run], Iterable[Row]]
    kind: str = ""
    ways: tuple[str, ...] = ALL
    apart: str = ""
    cpu: bool = True
    who: tuple[str, ...] = ("alone", "a", "b")


def _few(run: Run) -> list[Row]:
    """Compare a few hits, and check that the output depends on the prompt."""
    scale, prompts, own = run.scale, run.prompts, KINDS[run.kind].few
    if own or ("layer_types" in scale.model and not run.fleet.in_place):
        # Through a pool those of a model with windows need their chunk's end, which one that parts
        # may not have.
        hits = [*map(prompts.whole, 3 * scale.few), *map(prompts.parting, own[:2])]
    else:
        # Blocks of states are long.
        hits = prompts.hits(dict.fromkeys([*scale.few[1:], 2 * scale.few[-1]], 6))
    rows = equality.agreeing(run) + equality.equal(run, hits)
    rows += equality.flipped(run) if run.fleet.in_place else []
    return [*rows, *equality.sensitive(run)]


IN_PLACE = ("inplace",)
PARTS: dict[str, Part] = {
    "scheduler": Part(scheduling.scheduler_time, "", OURS, who=("a", "timed")),
    "ttft": Part(latency.first_token),
    # The time to first token of models with several block tables.
    "ttft_gpt_oss": Part(latency.first_token, "gpt_oss_graphs", IN_PLACE, "graphs"),
    "ttft_gemma3": Part(latency.first_token, "gemma3_graphs", IN_PLACE, "graphs"),
    "agreeing": Part(equality.agreeing),
    "sensitive": Part(equality.sensitive, who=("alone",)),
    "flipped": Part(equality.flipped, "", ("inplace", "both")),
    "equal": Part(equality.equal),
    "miss": Part(latency.miss, who=("alone", "a")),
    "fp8": Part(_few, "fp8", OURS, "modes"),
    "mla": Part(_few, "mla", OURS, "modes", cpu=False),
    "ngram": Part(_few, "ngram", OURS, "modes"),
    # Several block tables, the last ones' with states.
    "gemma3": Part(_few, "gemma3", OURS, "windows"),
    "gpt_oss": Part(_few, "gpt_oss", OURS, "windows"),
    "lfm2": Part(_few, "lfm2", ("vllm",), "windows"),
    "conv": Part(_few, "conv", IN_PLACE, "states"),
    "mamba2": Part(_few, "mamba2", IN_PLACE, "states", cpu=False),
    "gdn": Part(_few, "gdn", IN_PLACE, "states"),
    "v4": Part(_few, "v4", IN_PLACE, "v4", cpu=False),
    "tp2": Part(_few, "tp2", OURS, "tp2", cpu=False),
    "decode": Part(scheduling.decode_steps, "", IN_PLACE, "decode", who=tuple(ARMS.values())),
    "short": Part(latency.short_tax, "busy", OURS, "short", who=("alone", "a")),
    "tp2_gpt_oss": Part(_few, "tp2_gpt_oss_graphs", IN_PLACE, "graphs", cpu=False),
    "ttft_tp2_gpt_oss": Part(latency.first_token, "tp2_gpt_oss_graphs", IN_PLACE, "graphs", False),
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
            part = PARTS[name]
            prompts = fleet.prompts(part.kind, list(PARTS).index(name))
            with made.part(name):
                _arrange(fleet, names[index:])
                print(f"{name}: {made.clock.spent:.0f} s", flush=True)
                made.clock.check(5)
                run = Run(fleet, made.clock, prompts, options.rounds, part.kind)
                made.add(part.run(run))
                made.add(fleet.strayed())
    return made.end()


def _arrange(fleet: Fleet, names: Sequence[str]) -> None:
    """Start what the next part needs, with those that may run beside it; end the instances that
    none of them needs. On the CPU those apart start one at a time.
    """
    apart = PARTS[names[0]].apart
    now = [name for name in names if PARTS[name].apart == apart]
    now = now[:1] if apart and fleet.scale.cpu else now
    needed = {joined(PARTS[name].kind, who) for name in now for who in PARTS[name].who}
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
