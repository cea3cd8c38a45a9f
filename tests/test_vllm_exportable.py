"""What of vLLM decides whether its KV cache can be memory that other processes read: its
configuration, and its sources.

The memory: test_exportable.py; a GPU's: test_gpu_exportable.py. What is read there:
test_vllm_sharing.py."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Any

import pytest
from in_place_cases import Engine, engine, here, make
from vllm_cases import needs_vllm
from vllm_sources import differences

pytest.importorskip("vllm.v1.request", reason="vLLM is not installed")

from vcache_backend.config import Config
from vcache_backend.integration.vllm.in_place import exporter as exportable
from vcache_backend.integration.vllm.model import spec as model_spec

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm
UNCACHED = (
    "without prefix caching vLLM's KV cache keeps nothing to share: take out "
    "--no-enable-prefix-caching"
)
SLEEP = (
    "sleep mode frees nothing of a KV cache that others can map: start vLLM "
    "without --enable-sleep-mode"
)
EXPANDABLE = (
    "expandable_segments does not work with the allocator of a shared KV "
    "cache (pytorch issue 147851): take it out of"
)
MACHINE = "it relies on the order in which x86-64 makes writes visible, and this machine is aarch64"


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        ("parallel_config", "tensor_parallel_size", 2, None),
        ("parallel_config", "pipeline_parallel_size", 2, None),
        ("cache_config", "enable_prefix_caching", False, UNCACHED),
        ("model_config", "enable_sleep_mode", True, SLEEP),
        ("model_config", "enable_cumem_allocator", True, SLEEP),
        ("device_config", "device_type", "cuda", EXPANDABLE),
        (None, "machine", lambda: "aarch64", MACHINE),
    ],
    ids=["ranks", "stages", "uncached", "sleep", "cumem", "expandable", "machine"],
)
def test_what_cannot_be_shared_is_refused_in_one_line_with_what_to_change(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    section: str | None,
    name: str,
    value: Any,
    said: str | None,
) -> None:
    """vLLM's own configuration, changed in one thing. Of block tables: test_vllm_groups."""
    config, tables = engine.scheduler.vllm_config, engine.scheduler.kv_cache_config
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(getattr(config, section) if section else platform, name, value)
    model = model_spec.read_model(config)
    line = exportable.refusal(config, tables, model)
    shared = exportable.decide(Config(), config, tables, model).connector.share
    if said is None:
        assert (line, shared) == (None, "in_place")
        return
    assert line is not None
    assert (shared, "\n" in line) == ("pool", False)
    assert line.startswith(said)
    assert line.endswith("; or set connector.share: pool")


def test_the_installed_vllm_has_its_hooks_where_they_are_looked_for() -> None:
    """Nothing of it is imported for that."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert differences(Path(spec.origin).parent) == []
