"""What does vcache cost a step of vLLM in which requests only decode? On one GPU.

    python3 -m benchmarks.vllm_steps --out FILE [--scale full|tiny] [--arms alone,...]

Four engines with the shape of Llama 3.1 8B: vLLM alone, alone as `NixlConnector` has it (blocks of
64, layout HND), in place, and in place as `kv_consumer`. They are asked in turn. Each decodes 1, 8
and 32 requests; the consumer also 8 beside 28 that wait for a prompt which nobody computes.
`--scale tiny` runs the same on the CPU, to check the script."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vcache_backend.children import Child, MetadataServer, module
from vcache_backend.prove.prompts import Prompts

from .options import Measurement, names_of, parser
from .results import Row, row
from .vllm.environment import environment, visible
from .vllm.instances import Spec
from .vllm.scale import GIB, SCALES, Scale
from .vllm.settings import arguments, our_connector

START_SECONDS, STEPS_SECONDS = 600.0, 60.0
MS, US = 1e3, 1e6
RUNNING, STEPS, WAITING = (1, 8, 32), 48, 28
"""Requests that decode; steps of a round; requests that wait in `waiting`."""
HELD_UP, ARRIVING = 8, 3
"""Beside how many requests others wait, or arrive, and how many arrive in a round."""


class Arm(NamedTuple):
    """role: `kv_role`; empty: without a connector. block: tokens of a block; 0: the scale's."""

    role: str = ""
    block: int = 0
    layout: str = ""


ARMS = {
    "alone": Arm(),
    "hnd64": Arm(block=64, layout="HND"),
    "inplace": Arm("kv_both"),
    "consumer": Arm("kv_consumer"),
}


class Engines:
    """One of each arm, on the run's first GPU. The context manager ends them."""

    def __init__(self, scale: Scale, made: Measurement, options: argparse.Namespace) -> None:
        self.scale, self._folder, self._cache = scale, made.folder, options.cache
        self._model = scale.write_model(options.cache / f"model_{scale.name}")
        self._more = {"connector.share": "in_place", "connector.model": "steps"} | dict(options.set)
        with ExitStack() as undo:
            own = undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-steps-"))
            self._socket = Path(own, "vcache.sock")
            undo.enter_context(MetadataServer(self._socket, made.folder / "server.log"))
            self.all = {name: undo.enter_context(self._begun(name)) for name in options.arms}
            for child in self.all.values():
                child.answer(START_SECONDS)
            self._undo = undo.pop_all()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _begun(self, name: str) -> Child:
        arm, cpu, transfer = ARMS[name], self.scale.cpu, dict[str, Any]()
        if arm.role:
            given = our_connector(self._socket, 0, self.scale.chunk, self._more)
            transfer = given | {"kv_role": arm.role}
        scale = msgspec.structs.replace(self.scale, block=arm.block or self.scale.block)
        llm = arguments(scale, Spec(gpu=0, probed=True), self._model, transfer)
        settings = {"arguments": llm, "dummy": llm.get("load_format") == "dummy"}
        more = {"VLLM_KV_CACHE_LAYOUT": arm.layout} if arm.layout and not cpu else {}
        more |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if cpu else {}
        more |= {} if cpu else {"CUDA_VISIBLE_DEVICES": visible(0).split(",")[0]}
        command = module("benchmarks.vllm.child", json.dumps(settings))
        log = self._folder / f"{name}.log"
        return Child(name, command, log, environment(cpu, self._cache, **more))

    def steps(
        self,
        name: str,
        prompts: list[list[int]],
        waiting: Sequence[list[int]] = (),
        arriving: Sequence[list[int]] = (),
    ) -> tuple[list[float], dict[str, float]]:
        """How long each step took, in ms, and what our connector's methods took of one, in us."""
        file = self._folder / f"{name}-steps.jsonl"
        file.unlink(missing_ok=True)
        given: dict[str, Any] = {"prompts": prompts, "waiting": list(waiting)}
        given |= {"arriving": list(arriving), "count": STEPS, "extra": {"timed": str(file)}}
        seconds = self.all[name].ask("steps", STEPS_SECONDS, **given)
        spent = json.loads(file.read_text()) if file.exists() else {}
        count = spent.pop("steps", 0) or 1
        return [MS * each for each in seconds], {key: US * spent[key] / count for key in spent}


def decoding(engines: Engines, running: int, rounds: int) -> list[Row]:
    """The rows of so many requests."""
    scale, prompts = engines.scale, Prompts(*engines.scale.units, running)
    # Two thirds of the KV cache, and as much for one request as for one of eight.
    room = scale.kv_bytes // scale.token_bytes * 2 // 3
    length = min(room // max(8, running), scale.max_model_len // 4)
    asked = [prompts.new(length) for _ in range(running)]
    waiting = [prompts.new(length) for _ in range(WAITING if running == HELD_UP else 0)]
    ms, spent = defaultdict[str, list[float]](list), defaultdict[str, list[dict[str, float]]](list)
    for turn in range(rounds + 1):
        for name in sorted(engines.all, reverse=turn % 2 == 1):
            for kind, held in {name: [], "waiting": waiting}.items():
                if kind == name or (held and name == "consumer"):
                    took, own = engines.steps(name, asked, held)
                    ms[kind] += [statistics.median(took)] if turn else []
                    spent[kind] += [own] if turn else []
    what = f"TPOT p50 of {running} requests of {length} tokens that decode, steps of {STEPS}"
    rows = []
    for name, against in (*((arm, "alone") for arm in ARMS), ("waiting", "consumer")):
        if ms[name] and ms[against] and name != against:
            case = f"decode_tpot_{running}" + (f"_{name}" if name != "inplace" else "")
            most = 1.01 if name in ("inplace", "consumer", "waiting") else None
            said = f"{what}: {name}; reference: {against}; {_shares(spent[name])}"
            rows.append(row(case, "ms", ms[name], ms[against], what=said, at_most=most))
    return rows


def arrivals(engines: Engines, rounds: int) -> list[Row]:
    """What a request that begins with a hit adds to the steps of those that decode: its last token
    is computed, as after a load by `NixlConnector`, or its last two tokens, in a step of another
    shape. The consumer loads its hits from the engine in place, on the same GPU."""
    scale, prompts = engines.scale, Prompts(*engines.scale.units, 99)
    length, added = scale.max_model_len // 8, defaultdict[str, list[float]](list)
    asked = [prompts.new(length) for _ in range(HELD_UP)]
    arms = [("alone", "alone", 1), ("alone", "alone", 2), ("consumer", "inplace", 2)]
    for turn in range(rounds + 1):
        for name, owner, tail in arms:
            if name in engines.all and owner in engines.all:
                blocks = length // scale.block * scale.block
                coming = [prompts.new(blocks + tail) for _ in range(ARRIVING)]
                for prompt in coming:
                    engines.all[owner].ask("generate", STEPS_SECONDS, tokens=prompt, count=1)
                took, _ = engines.steps(name, asked, (), coming)
                more = sum(took) - len(took) * statistics.median(took)
                added[f"{name}_{tail}"] += [more / ARRIVING] if turn else []
    what = f"ms that a hit of {length} tokens adds to the steps of {HELD_UP} requests; reference: "
    what += "one token of it is computed, in the own cache"
    first = added["alone_1"]
    return [row(f"decode_arrival_{name}", "ms", ms, first, what=what) for name, ms in added.items()]


def _shares(spent: list[dict[str, float]]) -> str:
    """What the connector's two halves take of a step."""
    named = sorted({name for each in spent for name in each})
    own = {name: statistics.median(each.get(name, 0.0) for each in spent) for name in named}
    worker = sum(took for name, took in own.items() if name.startswith("worker."))
    each = ", ".join(f"{name} {took:.1f}" for name, took in own.items() if took >= 0.5)
    return f"us a step: scheduler {sum(own.values()) - worker:.1f}, worker {worker:.1f} ({each})"


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring. 1 if a row missed its limit."""
    made = parser("vllm_steps", __doc__, 240.0)
    made.add_argument("--scale", choices=("full", "tiny"), default="full")
    made.add_argument("--arms", type=names_of(ARMS), default=list(ARMS), help=", ".join(ARMS))
    made.add_argument("--rounds", type=int, default=5)
    options = made.parse_args(arguments)
    measurement, scale = Measurement(options), SCALES[options.scale]
    # Four of them on one GPU.
    scale = msgspec.structs.replace(scale, kv_bytes=GIB // 64 if scale.cpu else 12 * GIB)
    with measurement.part("start"), Engines(scale, measurement, options) as engines:
        print(f"all engines answer: {measurement.clock.spent:.0f} s", flush=True)
        for running in RUNNING:
            with measurement.part(f"{running} running"):
                measurement.clock.check(10)
                measurement.report.add(decoding(engines, running, options.rounds))
        with measurement.part("arrivals"):
            measurement.report.add(arrivals(engines, options.rounds))
    return measurement.end()


if __name__ == "__main__":
    sys.exit(main())
