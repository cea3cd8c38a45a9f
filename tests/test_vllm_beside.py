"""Real vLLM on the CPU with another connector beside ours, under vLLM's MultiConnector. The engine is a process of its own, as in
`vllm serve`, so that statistics cross a border."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import eventually
from vllm_cases import CHUNK, Node, missing, new_tokens, node

WHY_NOT = missing(())
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "vLLM is here"), pytest.mark.timeout(300)]


def both(here: Node, storage: str, *, ours_first: bool, **more: Any) -> dict[str, Any]:
    """storage: a name; the other connector has nothing under a new one."""
    ours = here.transfer()
    other = {"kv_connector": "BesideConnector", "kv_connector_module_path": "vllm_beside", "kv_role": "kv_both"}
    other["kv_connector_extra_config"] = {"shared_storage_path": str(here.folder / storage)}
    connectors = [ours, other] if ours_first else [other, ours]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
        **more,
    }


def test_whichever_comes_first_both_connectors_work(tmp_path: Path) -> None:
    tokens, warning = new_tokens(4 * CHUNK + 1), 'put "kv_load_failure_policy":"recompute" beside "kv_connector":"MultiConnector"'
    with node(tmp_path) as here:
        transfer, process = both(here, "one", ours_first=False), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        instance = here.alone("beside", process, kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=True)
        computed = instance.one(tokens)
        assert computed.cached == 0
        eventually(lambda: here.stats().chunks == 4)
        eventually(lambda: instance.counter("vllm:vcache_stored_tokens") == 4 * CHUNK)
        assert warning in instance.log
        assert any((here.folder / "one").iterdir())
        said = len(instance.log)
        transfer = both(here, "two", ours_first=True, kv_load_failure_policy="recompute")
        model = {"model": str(here.model), "disable_hybrid_kv_cache_manager": True}
        assert not instance.restart(kv_transfer_config=transfer, **model)
        found = instance.one(tokens)
        assert found.cached == 4 * CHUNK
        assert found.agrees(computed)
        by_source = "vllm:prompt_tokens_cached_by_source"
        eventually(lambda: instance.counter(by_source, source="host") == 4 * CHUNK)
        assert warning not in instance.log[said:]
