"""Other connectors beside ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_transfer", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vcache_backend.integration.vllm.others import ANSWERS, Guarded

HOOKS = [name for name in dir(KVConnectorBase_V1) if not name.startswith("_")]


@pytest.mark.parametrize("name", HOOKS)
def test_whatever_another_connector_raises_ends_there(name: str) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    child = Guarded(type("Raising", (), dict.fromkeys(HOOKS, fails))())
    assert [getattr(child, name)() for _ in "12"] == [ANSWERS.get(name, lambda: None)()] * 2
    assert child.off_at


def test_what_lmcache_has_answered_before_is_forgotten() -> None:
    """Below 0.5.6 it adds up, and what it takes for stored it does not store."""
    told = SimpleNamespace(num_stored_tokens=512)
    child = Guarded(SimpleNamespace(request_trackers={"asked": told}))
    for name in ("asked", "new"):
        child.forget_answers(name)
    assert told.num_stored_tokens == 0
