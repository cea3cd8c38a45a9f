"""An excerpt of Mooncake's public conversation trace, and the tokens its ids stand for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

BLOCK_TOKENS = 512
"""Tokens one id of the trace stands for; the last id of a request may stand for fewer."""
VOCABULARY = 128_000
EXCERPT = Path(__file__).parent / "data" / "mooncake-conversation-excerpt.jsonl"


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
    """The excerpt in `data/`, in the order of the trace."""
    return read(EXCERPT.read_bytes())


def tokens(request: Request) -> np.ndarray:
    """The prompt: BLOCK_TOKENS random tokens an id, seeded by the id, cut to the request's length (int64)."""
    blocks = [np.random.default_rng(id_).integers(0, VOCABULARY, BLOCK_TOKENS) for id_ in request.hash_ids]
    return np.concatenate(blocks)[: request.input_length]
