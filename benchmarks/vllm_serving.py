"""Two vLLM servers under load, requests in turn to the one and the other: what does sharing their KV bring?

    python3 -m benchmarks.vllm_serving --out FILE --trace mooncake-conversation.jsonl [--systems alone,offload,mp,vcache]

Real OpenAI servers, one a GPU, of a model with the shape of Llama-3.1-8B and dummy weights; prompts are token ids, answers have a
fixed length. Every system has the same VRAM for KV: what vcache lends to the pool its vLLM does without. Two workloads: `prefix`,
the requests of `vllm bench serve --dataset-name prefix_repetition` (sent by a client of ours: vLLM's needs a tokenizer and knows
one address), so many at a time; `trace`, conversations of Mooncake's trace at their times, scaled. The servers start empty, are
warmed up with prompts nobody asks again, and are ended after the last workload.

Rows are written after every workload of every system. Comparisons need ours and the other's rows of the same workload in the file,
which may be of two runs. `--scale tiny` runs the same on the CPU, for the sake of the script. `--plot PICTURE` draws the file given
by `--out` and measures nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .results import Clock, Report
from .serving.measure import Bench, run_all
from .serving.sizes import SIZES, Sizes
from .serving.systems import SYSTEMS
from .serving.workloads import WORKLOADS
from .vllm.scale import GIB
from .vllm.weights import write_model
from .vllm_ttft import common_options, end_in_time, names_of

ORDER = ("alone", "offload", "mp", "vcache")
"""With two pairs of GPUs the first two run beside each other, and then the others: those that use host memory apart."""


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text. 1 if a row missed its limit or a system failed."""
    options = _options(arguments)
    if options.plot:
        from .plot import serving

        serving(options.out, options.plot)
        return 0
    end_in_time(options.seconds)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vcache-serving-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    sizes = _sizes(options)
    systems = [name for name in options.systems if not _left_out(name, sizes)]
    bench = Bench(
        sizes=sizes,
        model=write_model(folder / "model", sizes.scale),
        folder=folder,
        cache=options.cache,
        more=dict(setting.removeprefix("vcache.").split("=", 1) for setting in options.set),
        workloads=options.workloads,
        report=Report(options.out, options.commit),
        clock=Clock(options.seconds),
    )
    print(f"logs in {folder}", flush=True)
    size = 2 if options.pairs else len(options.gpus)
    failed = run_all(bench, systems, [options.gpus[start : start + size] for start in range(0, len(options.gpus), size)])
    signal.alarm(0)
    print(bench.report.table())
    print(f"{bench.clock.spent:.0f} s{'; failed: ' + ', '.join(failed) if failed else ''}", flush=True)
    return int(bool(failed) or bench.report.missed)


def _left_out(name: str, sizes: Sizes) -> bool:
    why = SYSTEMS[name].gpu_only if sizes.scale.cpu else ""
    if why:
        print(f"{name} is left out: {why}", flush=True)
    return bool(why)


def _sizes(options: argparse.Namespace) -> Sizes:
    """The scale's, with what was asked for otherwise."""
    sizes = SIZES[options.scale]
    asked = {
        field: getattr(options, field) for field in sizes.plan.__struct_fields__ if getattr(options, field, None) is not None
    }
    plan = msgspec.structs.replace(sizes.plan, **asked)
    over = {
        "kv_bytes": None if options.kv_gib is None else int(options.kv_gib * GIB),
        "pool_bytes": None if options.pool_gib is None else int(options.pool_gib * GIB),
        "host_gib": options.host_gib,
        "seqs": options.seqs,
    }
    return msgspec.structs.replace(sizes, plan=plan, **{key: value for key, value in over.items() if value is not None})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vllm_serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common_options(parser, 540.0)
    parser.add_argument(
        "--systems", type=names_of(ORDER), default=list(ORDER), help=f"with commas between them, of {', '.join(ORDER)}"
    )
    parser.add_argument("--workloads", type=names_of(WORKLOADS), default=list(WORKLOADS), help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--scale", choices=SIZES, default="full")
    parser.add_argument("--gpus", type=_ordinals, help="default: 0,1; with --pairs: 0,1,2,3")
    parser.add_argument("--pairs", action="store_true", help="a system on each pair of --gpus at the same time")
    memory = parser.add_argument_group("memory; default: the scale's")
    memory.add_argument("--kv-gib", type=float, help="vLLM's KV cache of an instance beside a pool")
    memory.add_argument("--pool-gib", type=float, help="lent to the pool by an instance; without a pool it is KV cache")
    memory.add_argument("--host-gib", type=float, help="host memory of the systems that use it, for both instances together")
    memory.add_argument("--seqs", type=int, help="requests that an instance runs at a time")
    load = parser.add_argument_group("workloads, lengths in tokens; default: the scale's")
    for name in ("seed", "output", "prefixes", "prefix", "suffix", "repeats", "concurrency", "longest"):
        load.add_argument(f"--{name}", type=int)
    load.add_argument("--trace", help="Mooncake's conversation trace, JSON lines")
    load.add_argument("--trace-block", type=int, help="tokens that 512 of the trace become")
    load.add_argument("--trace-tokens", type=int, help="prompt tokens in all")
    load.add_argument("--trace-turns", type=int, help="only conversations of at least so many requests")
    load.add_argument("--trace-seconds", type=float, help="what the arrivals are squeezed into")
    options = parser.parse_args(arguments)
    if options.plot and not options.out:
        parser.error("--plot draws the file given by --out")
    options.gpus = options.gpus or ([0, 1, 2, 3] if options.pairs else [0, 1])
    if len(options.gpus) % 2 or (len(options.gpus) != 2 and not options.pairs):
        parser.error(f"two servers take two GPUs, and --gpus names {len(options.gpus)}; for more pairs of them say --pairs")
    if not options.plot and "trace" in options.workloads and not options.trace:
        parser.error("the workload `trace` needs --trace FILE")
    return options


def _ordinals(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
