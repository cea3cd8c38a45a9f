"""Data parallel ranks of one `vllm serve`: how long until a rank's first token, when another one
has computed the prompt?

Each rank is an instance on a GPU of its own; with expert parallelism each has half of the experts,
and all take part in every step. Rank 0 computes a new prompt, then rank 1 is asked the same over
the same HTTP; the next time it is the other way round. Times are the client's, from before it
connects: front end and JSON are in both."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ..processes import Program, free_ports, module, until
from ..results import Clock, Row, fraction, row
from ..serving.client import Answer, complete
from ..serving.servers import START_SECONDS, counters, healthy
from ..serving.systems import MODEL, SIZES, serve_arguments
from .environment import CPU_ENVIRONMENT, ENVIRONMENT, on_one_gpu, visible
from .fleet import Fleet
from .latency import TAIL
from .prompts import Prompts

LENGTH = "16k"
RANKS = 2
WARM_UP = 2
ALLOWED = 0.1
"""Of the time that computing takes."""
STORED_SECONDS = 10.0
ANSWER_SECONDS = 60.0


def first_token(
    fleet: Fleet, clock: Clock, prompts: Prompts, rounds: int, kind: str = ""
) -> list[Row]:
    """A hit of 16k tokens that another rank has computed, against computing them; and whether all
    were hits.

    kind: of a mixture of experts, spread over the ranks; otherwise every rank has the whole plain
    model."""
    hits: list[float] = []
    computed: list[float] = []
    whole: list[bool] = []
    length = fleet.scale.lengths[LENGTH] + TAIL
    with _serving(fleet, kind) as port:
        for turn in range(rounds + WARM_UP):
            if turn > WARM_UP and clock.left < 15:
                break
            clock.check(10)
            fleet.pool.clear()
            prompt, writer = prompts.new(length), turn % RANKS
            first = _ask(port, prompt, writer)
            _until_shared(fleet, length // fleet.scale.chunk)
            before = counters(port)["external"]
            second = _ask(port, prompt, (writer + 1) % RANKS)
            if turn >= WARM_UP:
                computed.append(1e3 * (first.first - first.sent))
                hits.append(1e3 * (second.first - second.sent))
                loaded = counters(port)["external"] - before
                whole.append(
                    (first.cached, second.cached, loaded)
                    == (0, fleet.scale.hit(length), fleet.scale.hit(length))
                )
    name, limit = (
        ("ep" if kind else "dp"),
        (None if kind or fleet.scale.cpu or on_one_gpu() else ALLOWED),
    )
    ranks = "expert and data parallel" if kind else "data parallel"
    what = f"TTFT over HTTP of {length} tokens that the other {ranks} rank of one `vllm serve` has computed; reference: computed"
    what += ", both ranks on one GPU" if on_one_gpu() and not fleet.scale.cpu else ""
    return [
        row(
            f"{fleet.rows}_{name}_hit_ttft_{LENGTH}", "ms", hits, computed, what=what, at_most=limit
        ),
        fraction(
            f"{fleet.rows}_{name}_hits",
            whole,
            "prompts of which the rank that had not computed them loaded all whole chunks",
        ),
    ]


@contextmanager
def _serving(fleet: Fleet, kind: str) -> Iterator[int]:
    """The port of a server with `RANKS` ranks."""
    scale, (port,), path = fleet.of(kind), free_ports(1), fleet.server.path
    sizes = msgspec.structs.replace(
        SIZES["tiny" if scale.cpu else "full"], scale=scale, kv_bytes=scale.kv_bytes
    )
    sizes = msgspec.structs.replace(sizes, pool_bytes=scale.pool_bytes)
    side = {
        "socket": path,
        "index": 0,
        "more": {name.removeprefix("vcache."): value for name, value in fleet.more.items()},
    }
    arguments = serve_arguments(
        "inplace" if fleet.in_place else "vcache", sizes, fleet.model(kind), port, side
    )
    arguments += [
        "--data-parallel-size",
        str(RANKS),
        *(["--enable-expert-parallel", "--enforce-eager"] if kind else []),
    ]
    server = "vllm.entrypoints.openai.api_server"
    shared = [f"{__package__}.one_gpu", server] if on_one_gpu() and not scale.cpu else [server]
    command = module(*shared, *arguments)
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(fleet.cache)}
    environment |= CPU_ENVIRONMENT if scale.cpu else {"CUDA_VISIBLE_DEVICES": visible(0)}
    with Program("dp", command, fleet.folder / "dp.log", environment) as program:
        program.until(lambda: healthy(port), START_SECONDS)
        yield port


def _ask(port: int, prompt: list[int], rank: int) -> Answer:
    asked = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
    }
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    answer = Answer()
    asyncio.run(asyncio.wait_for(complete(port, body, answer, rank), ANSWER_SECONDS))
    return answer


def _until_shared(fleet: Fleet, chunks: int) -> None:
    """Until others can find so many; what is late is told of by the hit that is too short."""

    def shared() -> bool:
        stats = fleet.pool.stats()
        return stats.chunks + sum(one.resident for one in stats.instances) >= chunks

    until(shared, STORED_SECONDS, 0.005)
