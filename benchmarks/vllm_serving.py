"""vLLM servers under load: what does sharing their KV bring, and what a router before them?

    python3 -m benchmarks.vllm_serving --out FILE --arms alone:turn,alone:cache_aware16,inplace:turn
                                       --workloads fork,prefix [--trace mooncake-conversation.jsonl]

Real OpenAI servers, one a GPU, of a model with the shape of Llama-3.1-8B and dummy weights; prompts
are token ids, answers have a fixed length. Every system has the same VRAM for KV: what vcache lends
to the pool its vLLM does without; in place it is all vLLM's.

An arm is a system and the policy that distributes its requests: `turn`, or the real `vllm-router`
with `cache_aware`, with its threshold behind it. `prefix_32k_8` is `prefix` with prefixes of
32 x 1,024 tokens and eight requests in flight; `prefix_32k_8_12x4` has 12 such prefixes, each with
four prompts, and `prefix_32k_8_12x4_512` answers of 512 tokens.
The systems with `_dp` are one server with data parallel ranks. In the end their hits are compared.

Workloads are in `serving.workloads` and `serving.trace`. Every arm gets the same prompts, with
empty caches and a new router. The servers of a system are warmed up with prompts nobody asks again,
and end after the last workload. With `--together` those of all systems stand beside each other, if
their GPUs have room, and the arms take turns: they share the host's moods, and start at once. Each
of `--runs` has other prompts; rows are their medians.

Rows are written after every run of every arm. Rows that compare need both arms in the file.
`--scale tiny` runs the same on the CPU, for the sake of the script."""

from __future__ import annotations

import argparse
import asyncio
import gc
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product

import msgspec
import numpy as np

from .options import Measurement, names_of, parser
from .results import Clock
from .serving import workloads
from .serving.client import LATE, send
from .serving.ranks import equal
from .serving.router import POLICIES, Arm, way
from .serving.servers import Servers
from .serving.summary import Figures, apart, compared, rows_of
from .serving.systems import MODEL, SIZES, SYSTEMS, Sizes
from .serving.trace import conversations
from .serving.workloads import FIRST, Plan, Request, Workload
from .vllm.instances import GIB, KINDS, joined

WORKLOADS = {
    "prefix": workloads.prefix_repetition,
    "trace": conversations,
    "fork": workloads.fork,
    "chat": workloads.chat,
}
SHAPED = re.compile(r"prefix_(\d+)k_(\d+)(?:_(\d+)x(\d+))?(?:_(\d+))?")
WARM_SECONDS, LOAD_SECONDS, LEAST_SECONDS = 60.0, 300.0, 20.0
"""When the warm-up and a phase are cut: what is not answered by then is an error. With less left
than the last, no workload is begun.
"""
SETTLES = 0.5
"""Seconds after a warm-up round or a reset: what it left is stored in the background."""
PLANNED = tuple(
    name for name in Plan.__struct_fields__ if name not in ("vocabulary", "block", "warm")
)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text. 1 if a row missed its limit or a system failed."""
    options = _options(arguments)
    sizes, made = _sizes(options), Measurement(options)
    model = sizes.scale.write_model(options.cache / f"model_{sizes.scale.name}")
    place = options.gpus, model, made.folder, options.cache, dict(options.set)
    systems = dict.fromkeys(arm.system for arm in options.arms)
    loads = dict[str, list[Workload]]()
    for beside in [systems] if options.together else [[system] for system in systems]:
        with ExitStack() as stack:
            started = dict[str, Servers]()
            for system in beside:
                with made.part(system):
                    made.clock.check(LEAST_SECONDS)
                    started[system] = stack.enter_context(Servers(system, sizes, *place))
            # While the servers start.
            loads = loads or _loads(options, sizes)
            up = dict[str, Servers]()
            for system, servers in started.items():
                with made.part(system):
                    _start(servers, sizes, made.clock)
                    up[system] = servers
            for runs in loads.values():
                _measure([arm for arm in options.arms if arm.system in up], up, runs, made)
            for system, servers in up.items():
                if SYSTEMS[system].ranks and SYSTEMS[system].share:
                    case = "x4_" * (sizes.instances == 4) + f"dp_{joined(options.model, system)}"
                    with made.part(case):
                        made.clock.check(LEAST_SECONDS)
                        prompts = sizes.scale.prompts(SYSTEMS[system].share == "in_place")
                        told = servers.ports[0], sizes.instances, prompts, sizes.plan.prefix
                        made.add(equal(case, *told))
    for workload in [*options.workloads, *options.once]:
        name, plan = joined(options.model, workload), _shaped(workload, sizes.plan)[1]
        made.add(compared(made.rows, name, len(options.gpus) == 4))
        made.add(apart(made.rows, name, plan, sizes.prefills, len(options.gpus)))
    return made.end()


def _loads(options: argparse.Namespace, sizes: Sizes) -> dict[str, list[Workload]]:
    """By workload its runs. Each has a seed of its own."""
    loads = dict[str, list[Workload]]()
    every = [*product(options.workloads, options.runs), *product(options.once, options.runs[:1])]
    for workload, run in every:
        kind, plan = _shaped(workload, sizes.plan)
        load = WORKLOADS[kind](msgspec.structs.replace(plan, seed=plan.seed + run))
        for phase in load.phases:
            phase.requests[:] = [each.made(MODEL) for each in phase.requests]
        ceiling = workloads.ceiling(load.phases, plan.block)
        named = load._replace(name=joined(options.model, workload), ceiling=ceiling)
        loads.setdefault(workload, []).append(named)
    gc.collect()
    gc.freeze()
    return loads


def _shaped(name: str, plan: Plan) -> tuple[str, Plan]:
    """A workload's kind and its plan."""
    if not (shape := SHAPED.fullmatch(name)):
        return name, plan
    tokens, many, prefixes, repeats, output = (int(part or 0) for part in shape.groups())
    own = {"prefixes": prefixes, "repeats": repeats, "output": output}
    shaped = {"prefix": 1024 * tokens, "concurrency": many}
    shaped |= {name: value for name, value in own.items() if value}
    return "prefix", msgspec.structs.replace(plan, **shaped)


def _start(servers: Servers, sizes: Sizes, clock: Clock) -> None:
    """Wait for the servers, and warm them up. Raises ChildFailed for servers that do not start."""
    took = servers.wait(clock.left)
    print(f"{servers.name}: {len(servers.ports)} servers up after {took:.0f} s", flush=True)
    for error in _warm(servers, sizes.plan)[:3]:
        print(f"{servers.name}: warm-up: {error}", flush=True)


def _measure(
    arms: Sequence[Arm], up: Mapping[str, Servers], runs: Sequence[Workload], made: Measurement
) -> None:
    """All runs of one workload, each through all arms. An arm that fails has no more runs."""
    found: dict[Arm, list[Figures]] = {arm: [] for arm in arms}
    for load, arm in product(runs, arms):
        if arm in found:
            figures = found.pop(arm)
            with made.part(f"{arm.name} {load.name}"):
                made.clock.check(LEAST_SECONDS)
                figures.append(_run(arm, up[arm.system], load, made))
                label = f"{up[arm.system].label}, {arm.said}"
                done = runs[: len(figures)]
                seeds = [f" and {each.what.rpartition(' ')[2]}" for each in done[1:]]
                what = done[0].what + "".join(seeds)
                made.add(rows_of(arm.name, load.name, figures, label, what))
                found[arm] = figures


def _run(arm: Arm, servers: Servers, load: Workload, made: Measurement) -> Figures:
    """One run of a workload through an arm. Raises ChildFailed, OutOfTime."""
    servers.reset()
    # Each server takes some steps: through a pool a reset is over after the next one.
    step = Request(tokens=np.full(8, FIRST, np.uint32), output=1).made(MODEL)
    asyncio.run(send([step] * 2 * len(servers.ports), servers.ports, 1, WARM_SECONDS))
    # A server that only computes prompts hears of the others' resets with its next heartbeat.
    time.sleep(2.5 if servers.apart else SETTLES)
    with way(arm, servers, made.folder) as ports:
        found = _answered(ports, load, made.clock, servers)
    print(
        f"{made.clock.spent:4.0f} s  {arm.name} {load.name}: {found.throughput:.2f} requests/s "
        f"in {found.duration:.1f} s, {found.errors} errors, hit rate "
        f"{found.hit_rate:.3f} of {load.ceiling:.3f}, {found.steps}",
        flush=True,
    )
    return found


def _answered(ports: Sequence[int], load: Workload, clock: Clock, servers: Servers) -> Figures:
    """One run of a workload, phase by phase."""
    how = servers.apart, servers.prefills
    figures = Figures(load.ceiling)
    for phase in load.phases:
        seconds = min(LOAD_SECONDS, clock.left)
        answers = asyncio.run(send(phase.requests, ports, phase.concurrency, seconds, *how))
        if seconds < LOAD_SECONDS and any(answer.error == LATE for answer in answers):
            # The run's own end cut it: without its last answers a phase looks faster than it was.
            clock.check(seconds)
        for error in sorted({answer.error for answer in answers if answer.error})[:3]:
            print(f"  {load.name}: {error}", flush=True)
        if phase.counted:
            figures.add(answers)
    return figures


def _warm(servers: Servers, plan: Plan) -> list[str]:
    """Prompts of the warm-up to a server, then to the next, twice: misses, and hits of what the
    other one has. The errors.
    """
    ports, how = servers.ports, (servers.apart, servers.prefills)
    prompts, errors = [request.made(MODEL) for request in workloads.warm_up(plan)], list[str]()
    for turn in range(4):
        half = prompts[turn // 2 :: 2]
        by = 0 if servers.apart else turn
        shifted = [ports[(index + by) % len(ports)] for index in range(len(ports))]
        answers = asyncio.run(send(half, shifted, len(half), WARM_SECONDS / 4, *how))
        errors += [answer.error for answer in answers if answer.error]
        time.sleep(SETTLES)
    return errors


def _sizes(options: argparse.Namespace) -> Sizes:
    """The scale's, with what was asked for otherwise. KV caches of another model have room for as
    many tokens."""
    sizes, kind = SIZES[options.scale], options.model
    scale = KINDS[kind].of(sizes.scale)
    each = options.memory * scale.token_bytes / sizes.scale.token_bytes
    given = {name: value for name in PLANNED if (value := getattr(options, name)) is not None}
    return msgspec.structs.replace(
        sizes,
        scale=msgspec.structs.replace(scale, name=joined(scale.name, kind)),
        plan=msgspec.structs.replace(sizes.plan, vocabulary=scale.vocabulary, **given),
        kv_bytes=int(sizes.kv_bytes * each),
        pool_bytes=int(sizes.pool_bytes * each),
        host_bytes=int(options.host_gib * GIB) or sizes.host_bytes,
        instances=len(options.gpus),
        prefills=options.prefills or len(options.gpus) // 2,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("vllm_serving", __doc__, 540.0)
    option = made.add_argument
    arms = (
        f"SYSTEM:POLICY with commas between; systems: {', '.join(SYSTEMS)}; policies: "
        f"{', '.join(POLICIES)}; '': only compare and print (default: %(default)s)"
    )
    option("--arms", type=_arms, default="alone:turn,inplace:turn", help=arms)
    usual = "prefix,fork,chat"
    option("--workloads", type=_workloads, default=usual, help=f"of {', '.join(WORKLOADS)}")
    option("--once", type=_workloads, default=[], help="further ones, for the first run only")
    option("--scale", choices=SIZES, default="full")
    models = [kind for kind in KINDS if KINDS[kind].several]
    option("--model", choices=models, default="", help="in place of Llama's shape")
    option("--together", action="store_true", help="all systems stand beside each other")
    option("--gpus", type=_numbers, default="0,1", help="one for each server")
    option("--prefills", type=int, help="servers that compute prompts apart (default: half)")
    option("--memory", type=float, default=1.0, help="of the scale's KV caches")
    option("--host-gib", type=float, default=0, help="of host memory, for those that keep KV there")
    option("--runs", type=_numbers, default="0", help="numbers of runs, each with other prompts")
    load = made.add_argument_group("workloads, see `serving.workloads.Plan`; default: the scale's")
    for name in PLANNED:
        kind = type(getattr(SIZES["full"].plan, name))
        load.add_argument(f"--{name.replace('_', '-')}", type=kind)
    options = made.parse_args(arguments)
    if "trace" in options.workloads + options.once and not options.trace:
        made.error("the workload `trace` needs --trace FILE")
    return options


def _workloads(text: str) -> list[str]:
    names_of(WORKLOADS)(SHAPED.sub("prefix", text))
    return text.split(",")


def _arms(text: str) -> list[Arm]:
    try:
        return [Arm.parse(each) for each in text.split(",") if each]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
