"""The requests of the demo: an excerpt of Mooncake's public conversation trace, and the tokens its ids stand for.

`python -m vcache_backend.demo.trace TRACE` writes the excerpt in `data/` again, byte for byte, from the whole trace.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

BLOCK_TOKENS = 512
"""Tokens one id of the trace stands for; the last id of a request may stand for fewer."""
VOCABULARY = 128_000
EXCERPT = "mooncake-conversation-excerpt.jsonl"

LONGEST = 8192
WINDOW = 900
TURNS = 2
REQUESTS = 300


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the trace. `timestamp` in ms, lengths in tokens; equal ids at the start of `hash_ids` mean equal prefixes."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(text: bytes) -> list[Request]:
    """The requests of a trace file. Raises msgspec.ValidationError on a line that is none."""
    return msgspec.json.Decoder(Request).decode_lines(text)


def excerpt() -> list[Request]:
    """The excerpt that comes with the package, in the order of the trace."""
    return read(resources.files("vcache_backend.demo").joinpath("data", EXCERPT).read_bytes())


def cut(trace: Sequence[Request]) -> list[Request]:
    """How the excerpt was made: short requests whose conversation comes back.

    Of the trace's first WINDOW requests of 513 to LONGEST tokens, those whose conversation (the same second id; the first is one
    system prompt for all) has at least TURNS requests among them; of these the first REQUESTS. So the hit rates of the
    excerpt are higher than those of the trace, where most conversations have one turn.
    """
    window = [r for r in trace if len(r.hash_ids) > 1 and r.input_length <= LONGEST][:WINDOW]
    turns = Counter(r.hash_ids[1] for r in window)
    return [r for r in window if turns[r.hash_ids[1]] >= TURNS][:REQUESTS]


def dump(requests: Sequence[Request]) -> bytes:
    """One JSON object a line."""
    return b"".join(msgspec.json.encode(request) + b"\n" for request in requests)


def tokens(request: Request) -> np.ndarray:
    """The prompt: BLOCK_TOKENS random tokens an id, seeded by the id, cut to the request's length (int64)."""
    blocks = [np.random.default_rng(id_).integers(0, VOCABULARY, BLOCK_TOKENS) for id_ in request.hash_ids]
    return np.concatenate(blocks)[: request.input_length]


if __name__ == "__main__":
    sys.stdout.buffer.write(dump(cut(read(Path(sys.argv[1]).read_bytes()))))
