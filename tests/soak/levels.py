"""The levels of the soak: which processes there are, what happens to them, and how much must be
seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.vllm.settings import ENVIRONMENT
from vcache_backend.prove.instance import CPU_ENVIRONMENT

from . import inplace, pooled
from .forked import SECONDS
from .living import Control, Role, Settings
from .memory import CHUNK_BYTES


class Level(NamedTuple):
    """counts: processes by role. mishaps: each one's weight. stops, pauses: see `Settings`. loads:
    how many must bring something, and in what share of them chunks must have changed. controls: each takes
    at most so many seconds. seconds: the longest that the level itself takes. silence: seconds
    after which a silent process counts as ended. prepare: fills the shared folder. longest_stop:
    seconds that a process stays stopped, at most. lends: bytes that an instance lends to a pool,
    through which it shares; 0: it shares in place. pause: loads and answers between two
    mishaps, on average."""

    life: Callable[[Settings, Connection], None]
    counts: dict[Role, int]
    mishaps: dict[str, int]
    loads: int
    controls: Sequence[Control]
    stops: float = 0.0
    reuse_hits: float = 0.0
    control_seconds: float = 120.0
    seconds: float = float("inf")
    silence: float = SECONDS
    prepare: Callable[[Path], None] = lambda folder: None
    longest_stop: float = 0.6
    pauses: float = 0.0
    lends: int = 0
    pause: float = 50.0


INPLACE = Level(
    life=inplace.live,
    counts={"owner": 4, "reader": 6},
    mishaps={
        "owner killed": 4,
        "reader killed": 2,
        "owner stopped": 8,
        "reader stopped": 8,
        "server killed": 1,
        "server stopped": 1,
        "namespaces reset": 1,
    },
    stops=0.0005,
    loads=100_000,
    reuse_hits=0.005,
    controls=("no comparison", "counted late", "published early"),
)
SOAK = Level(
    life=pooled.live,
    counts={"worker": 10},
    mishaps={
        "worker killed": 4,
        "worker stopped": 6,
        "server killed": 2,
        "server terminated": 1,
        "server stopped": 2,
    },
    stops=0.004,
    loads=100_000,
    reuse_hits=0.001,
    controls=("no comparison",),
    # Longer than pins and reservations last.
    longest_stop=3.0,
    pause=100.0,
    # Ten of 96 chunks a worker.
    lends=10 * CHUNK_BYTES,
)


def death(lends: int = 0) -> Level:
    """Whole vLLMs around their loads: four on GPUs, else three on the CPU. lends: see `Level`."""
    from . import whole

    on_gpus = torch.cuda.is_available()
    # What the processes inherit.
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    on_cpus = CPU_ENVIRONMENT | {"NUMBA_NUM_THREADS": "1"}
    os.environ.update(ENVIRONMENT | own | ({} if on_gpus else on_cpus))
    return Level(
        life=whole.live,
        prepare=whole.prepare,
        counts={"vllm": 4 if on_gpus else 3},
        mishaps={
            "vllm killed": 1,
            "vllm stopped": 20,
            "vllm starved": 10,
            "server killed": 1,
            "server stopped": 3,
            "server starved": 2,
        },
        stops=0.005,
        loads=500,
        reuse_hits=0.02,
        controls=("no comparison",),
        pauses=0.7,
        pause=4.0,
        lends=lends,
        seconds=360.0 if on_gpus else 1200.0,
        silence=240.0,
        longest_stop=1.2,
    )


LEVELS: dict[str, Callable[[], Level]] = {
    "soak": lambda: SOAK,
    "inplace": lambda: INPLACE,
    "death": death,
    "death_pool": lambda: death(lends=1 << 20),
}
