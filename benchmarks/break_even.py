"""At which speed of a link does a codec pay, and computing beat fetching? Arithmetic only: what goes in was measured elsewhere.

Fetching S bytes of KV over a link of L bytes a second takes S ÷ (ratio x L) and then S ÷ decode; the two are taken not to overlap,
which is how a single chunk comes. Encoding happens in the background and delays nobody. raw is read into its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Model(NamedTuple):
    """KV bytes of a token, and seconds to compute prompts of so many tokens."""

    name: str
    token_bytes: int
    prefill_seconds: Mapping[int, float]


LLAMA_8B = Model("Llama-3.1-8B, bf16, on one H200", 128 << 10, {1024: 0.026, 4096: 0.096, 16384: 0.471, 32768: 1.192})
"""As measured in this project's design."""


class Speed(NamedTuple):
    """A codec: bytes of KV for each byte of payload, and bytes of KV decoded in a second (inf: no time at all)."""

    name: str
    ratio: float
    decode: float


class Line(NamedTuple):
    """Links in bytes a second. The codec beats raw below `pays_below`; for a prompt of so many tokens computing beats fetching
    below the figure in `recompute_below`; inf: on every link, since decoding alone takes longer."""

    codec: str
    cores: int
    pays_below: float
    recompute_below: dict[int, float]


def line(speed: Speed, model: Model, cores: int = 1) -> Line:
    """Decoding is taken to be as many times faster as there are cores: chunks are decoded beside each other."""
    decode = speed.decode * cores
    pays = 0.0 if speed.ratio <= 1 else decode * (1 - 1 / speed.ratio)
    below = {}
    for tokens, needed in needed_bandwidth(model).items():
        left = 1 / needed - 1 / decode
        below[tokens] = 1 / (speed.ratio * left) if left > 0 else math.inf
    return Line(speed.name, cores, pays, below)


def needed_bandwidth(model: Model) -> dict[int, float]:
    """Bytes of KV a second that computing makes, by length of the prompt: what `offload.min_bandwidth` is compared with.

    That setting is about decoded bytes from end to end, so it is the same for every codec.
    """
    return {tokens: tokens * model.token_bytes / seconds for tokens, seconds in model.prefill_seconds.items()}


def table(speeds: Sequence[Speed], model: Model, cores: Sequence[int]) -> list[Line]:
    return [line(speed, model, count) for count in cores for speed in speeds if speed.name != "raw" or count == cores[0]]
