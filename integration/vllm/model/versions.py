"""The version of the weights: its digest in chunk keys, and the engine's calls that change it. See
docs/adr/0024."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from vllm.v1.engine.core import EngineCore

from ...hooks import observe

CHANGES = {"start_weight_update", "start_draft_weight_update", "update_weights"}
CHANGES |= {"finish_weight_update", "load_model", "reload_weights", "reset_weights"}
"""The calls of vLLM's workers that change weights."""


def digest(name: object) -> bytes:
    """Identify the version that a user calls `name`. Without a text, or with an empty text:
    `unknown`."""
    if not isinstance(name, str) or not name:
        return unknown()
    # JSON may bring half of a surrogate pair.
    data = name.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=32, person=b"vcache-weights-1").digest()


def unknown() -> bytes:
    """Identify weights that nobody has named: no other instance has them."""
    return secrets.token_bytes(32)


def watch() -> None:
    """Make every engine of this process tell its connectors of changes of weights
    (`weights_change`) and of named versions (`weights_are`). Idempotent.

    The engine calls both in its scheduler's thread, between two steps."""
    observe(EngineCore, "set_weight_version", "weight_version", after=_are)
    # Before the call, which may fail halfway.
    observe(EngineCore, "collective_rpc", "method", before=_change)


def _are(engine: Any, weight_version: str, *_: Any, **__: Any) -> None:
    for connector in _connectors(engine):
        connector.weights_are(weight_version)


def _change(engine: Any, method: Any, *_: Any, **__: Any) -> None:
    if str(getattr(method, "__name__", method)) in CHANGES:
        for connector in _connectors(engine):
            connector.weights_change()


def _connectors(engine: Any) -> Iterator[Any]:
    """The engine's connectors that have these methods, also inside a MultiConnector."""
    inside = [getattr(engine.scheduler, "connector", None)]
    for connector in inside:
        inside += getattr(connector, "_connectors", ())
        if hasattr(connector, "weights_are"):
            yield connector
