"""What a part of `vllm_ttft` works with."""

from __future__ import annotations

from typing import NamedTuple

from ..results import Clock
from .fleet import Fleet
from .prompts import Prompts


class Run(NamedTuple):
    """rounds: prompts of each length that are timed."""

    fleet: Fleet
    clock: Clock
    prompts: Prompts
    rounds: int
