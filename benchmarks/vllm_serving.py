"""vLLM servers under load, requests to each in turn: what does sharing their KV bring?

    python3 -m benchmarks.vllm_serving --out FILE --trace mooncake-conversation.jsonl
                                       [--systems alone,inplace]

Real OpenAI servers, one a GPU, of a model with the shape of Llama-3.1-8B and dummy weights; prompts
are token ids, answers have a fixed length. Every system has the same VRAM for KV: what vcache lends
to the pool its vLLM does without; in place it is all vLLM's.

Workloads: `prefix`, the requests of `vllm bench serve --dataset-name prefix_repetition` (sent by a
client of ours: vLLM's needs a tokenizer and knows one address), so many at a time; `trace`,
conversations of Mooncake's trace at their times, scaled; `unfiltered`, a part of that trace as it
is, so many at a time. The servers start empty, are warmed up with prompts nobody asks again, and
are ended after the last workload. Each of `--runs` has other prompts, and finds caches full of what
nobody asks for.

Rows are written after every workload of every system. Comparisons need ours and the other's rows of
the same workload and runs in the file, which may be of two calls. Four servers: `--gpus 0,1,2,3`.
`--scale tiny` runs the same on the CPU, for the sake of the script."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from .processes import ChildFailed
from .results import Clock, Report, write
from .serving.client import Job, Run
from .serving.servers import START_SECONDS, Servers
from .serving.summary import compared, figures, of_runs, raw_rows
from .serving.systems import MODEL, SIZES, SYSTEMS, Sizes, memory
from .serving.workloads import (
    WORKLOADS,
    Ceilings,
    Plan,
    Request,
    Tokens,
    ceilings,
    describe,
    warm_up,
)
from .vllm.weights import write_model
from .vllm_ttft import common_options, end_in_time, names_of

WARM_SECONDS, LOAD_SECONDS, LEAST_SECONDS = 60.0, 300.0, 20.0
"""When the warm-up and a workload are cut: what is not answered by then is an error. With less left
than the last, none is begun.
"""
SETTLES = 0.5
"""Seconds after a warm-up round: what it left is stored in the background."""
PLANNED = tuple(
    name
    for name in Plan.__struct_fields__
    if name not in ("vocabulary", "block", "warm", "servers")
)


class Workload(NamedTuple):
    """asked: server, body, at, of each of `requests`. name: of the rows."""

    name: str
    run: int
    requests: list[Request]
    asked: list[tuple[int, bytes, float | None]]
    what: str
    ceilings: Ceilings


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text. 1 if a row missed its limit or a system failed."""
    options = _options(arguments)
    end_in_time(options.seconds)
    sizes, clock, report = (
        _sizes(options),
        Clock(options.seconds),
        Report(options.out, options.commit),
    )
    workloads = [
        _workload(name, sizes.plan, run) for run in options.runs for name in options.workloads
    ]
    gc.collect()
    gc.freeze()
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vcache-serving-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs in {folder}", flush=True)
    model, failed = write_model(options.cache / f"model_{sizes.scale.name}", sizes.scale), []
    more = dict(setting.removeprefix("vcache.").split("=", 1) for setting in options.set)
    for system in options.systems:
        if why := SYSTEMS[system].gpu_only if sizes.scale.cpu else "":
            print(f"{system} is left out: {why}", flush=True)
            continue
        try:
            clock.check(LEAST_SECONDS)
            with Servers(
                system, sizes, options.gpus, model, folder, options.cache, more
            ) as servers:
                _measure(system, servers, sizes, workloads, clock, report, folder)
        except Exception as error:  # noqa: BLE001 - the other systems' rows count
            failed.append(system)
            print(f"{system}: FAILED: {type(error).__name__}: {error}", flush=True)
    signal.alarm(0)
    print(report.table())
    print(f"{clock.spent:.0f} s{'; failed: ' + ', '.join(failed) if failed else ''}", flush=True)
    return int(bool(failed) or report.missed)


def _workload(name: str, plan: Plan, run: int) -> Workload:
    """run: each has a seed of its own."""
    plan = msgspec.structs.replace(plan, seed=plan.seed + run)
    requests = WORKLOADS[name](plan)
    made = [(each.server, _body(each.tokens, plan), each.at) for each in requests]
    case_ = f"{name}_x{plan.servers}" if plan.servers != 2 else name
    return Workload(
        case_, run, requests, made, describe(name, plan, requests), ceilings(requests, plan.block)
    )


def _body(tokens: Tokens, plan: Plan) -> bytes:
    asked = {
        "model": MODEL,
        "prompt": tokens.tolist(),
        "max_tokens": plan.output,
        "temperature": 0,
        "ignore_eos": True,
    }
    return msgspec.json.encode(asked | {"stream": True, "stream_options": {"include_usage": True}})


def _measure(
    system: str,
    servers: Servers,
    sizes: Sizes,
    workloads: Sequence[Workload],
    clock: Clock,
    report: Report,
    folder: Path,
) -> None:
    """Raises ChildFailed for servers that do not start or end, OutOfTime; rows of workloads before
    that stay.
    """

    def say(text: str) -> None:
        print(f"{clock.spent:4.0f} s  {system:8} {text}", flush=True)

    took = servers.wait(min(START_SECONDS, clock.left))
    say(f"{len(servers.ports)} servers up after {took:.0f} s, {memory(system, sizes)}")
    for error in _warm(servers.ports, sizes.plan)[:3]:
        say(f"warm-up: {error}")
    if SYSTEMS[system].ours and not servers.counters()["external"]:
        raise ChildFailed(
            f"{system} shares nothing: in the warm-up no server hit what another one has; "
            f"{servers.said()}"
        )
    for work in workloads:
        clock.check(LEAST_SECONDS)
        name = work.name
        before = servers.counters()
        run = Run([Job(servers.ports[server], body, at) for server, body, at in work.asked])
        asyncio.run(run.go(sizes.plan.concurrency, min(LOAD_SECONDS, clock.left)))
        write(
            folder / f"answers_{system}_{name}_{work.run}.json",
            {"answers": msgspec.to_builtins(run.answers)},
        )
        for error in sorted({answer.error for answer in run.answers if answer.error})[:3]:
            say(f"{name}: {error}")
        after, known = servers.counters(), work.ceilings
        found = figures(run.answers, before, after)
        say(
            f"{name}: {found.throughput:.2f} requests/s in {found.duration:.1f} s, "
            f"{found.errors} errors, hit rate "
            f"{found.hit_rate:.3f} (ceiling {known.shared:.3f}, one a server "
            f"{known.single:.3f}, {known.unique:,} tokens in all), "
            f"{after['preemptions'] - before['preemptions']:.0f} preemptions"
        )
        report.add(
            of_runs(
                report.rows,
                work.run,
                raw_rows(system, name, found, known, work.what, memory(system, sizes)),
            )
        )
        report.add(compared(report.rows, name))


def _warm(ports: Sequence[int], plan: Plan) -> list[str]:
    """Prompts of the warm-up to a server, then to the next, twice: misses, and hits of what the
    other one has. The errors.
    """
    prompts, errors = warm_up(plan), []
    for turn in range(4):
        half = prompts[turn // 2 :: 2]
        run = Run(
            [
                Job(ports[(index + turn) % len(ports)], _body(tokens, plan))
                for index, tokens in enumerate(half)
            ]
        )
        asyncio.run(run.go(len(half), WARM_SECONDS / 4))
        errors += [answer.error for answer in run.answers if answer.error]
        time.sleep(SETTLES)
    return errors


def _sizes(options: argparse.Namespace) -> Sizes:
    """The scale's, with what was asked for otherwise."""
    sizes = SIZES[options.scale]
    plan = {name: value for name in PLANNED if (value := getattr(options, name)) is not None}
    return msgspec.structs.replace(
        sizes,
        kv_bytes=int(sizes.kv_bytes * options.memory),
        pool_bytes=int(sizes.pool_bytes * options.memory),
        host_gib=sizes.host_gib * options.memory,
        one_gpu=len(set(options.gpus)) == 1,
        plan=msgspec.structs.replace(sizes.plan, **plan, servers=len(options.gpus)),
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vllm_serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common_options(parser, 540.0)
    parser.add_argument(
        "--systems", type=names_of(SYSTEMS), default=list(SYSTEMS), help=f"of {', '.join(SYSTEMS)}"
    )
    parser.add_argument(
        "--workloads",
        type=names_of(WORKLOADS),
        default=list(WORKLOADS),
        help=f"of {', '.join(WORKLOADS)}",
    )
    parser.add_argument("--scale", choices=SIZES, default="full")
    parser.add_argument(
        "--gpus",
        type=_numbers,
        default=[0, 1],
        help="one for each server; 0,0: two on one GPU; default: 0,1",
    )
    parser.add_argument(
        "--memory",
        type=float,
        default=1.0,
        help="of the scale's KV caches and host memory; default: all",
    )
    parser.add_argument(
        "--runs",
        type=_numbers,
        default=[0],
        help="numbers of the runs to make, each with other prompts; default: 0",
    )
    load = parser.add_argument_group(
        "workloads, see `serving.workloads.Plan`; default: the scale's"
    )
    for name in PLANNED:
        kind = type(getattr(SIZES["full"].plan, name))
        load.add_argument(f"--{name.replace('_', '-')}", type=kind)
    options = parser.parse_args(arguments)
    if len(options.gpus) < 2:
        parser.error(f"it takes two servers, and --gpus names a GPU for {len(options.gpus)}")
    if {"trace", "unfiltered"} & set(options.workloads) and not options.trace:
        parser.error("the workloads `trace` and `unfiltered` need --trace FILE")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
