"""What of vLLM decides whether its KV cache can be memory that other processes read: real instances
on the CPU, and its sources.

The memory: test_exportable.py; a GPU's: test_gpu_exportable.py. What is read there:
test_vllm_sharing.py."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm_cases import Instance, Node, needs_vllm
from vllm_sources import differences

pytest.importorskip("vllm.v1.request", reason="vLLM is not installed")


pytestmark = needs_vllm


# ---- in the instance's process


def refusals(serving: Any) -> dict[str, tuple[str | None, str]]:
    """Why this instance, changed in one thing, may not share its KV cache, and how it shares if
    nothing is said. Of block tables: test_vllm_groups.
    """
    from vcache_backend.config import Config
    from vcache_backend.integration.vllm.in_place import exporter as exportable
    from vcache_backend.integration.vllm.model import spec as model_spec

    vllm_config = serving.llm.llm_engine.vllm_config
    kv_config = serving.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    model = model_spec.read_model(vllm_config)

    def of(target: Any = None, model: Any = model, **changes: Any) -> tuple[str | None, str]:
        before = {name: getattr(target, name) for name in changes}
        try:
            for name, value in changes.items():
                setattr(target, name, value)
            said = exportable.decide(Config(), vllm_config, kv_config, model)
            return exportable.refusal(vllm_config, kv_config, model), said.connector.share
        finally:
            for name, value in before.items():
                setattr(target, name, value)

    return {
        "as it is": of(),
        "several workers": of(model=msgspec.structs.replace(model, tp_size=2, pp_size=2)),
        "uncached": of(vllm_config.cache_config, enable_prefix_caching=False),
        "sleep": of(model=msgspec.structs.replace(model, sleep_mode=True)),
        "cumem": of(vllm_config.model_config, enable_cumem_allocator=True),
        "expandable": of(model=msgspec.structs.replace(model, device_type="cuda")),
        "machine": of(platform, machine=lambda: "aarch64"),
    }


# ---- in the test's


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("vllm"))
    with made.undo:
        yield made


@pytest.fixture(scope="module")
def alone(here: Node) -> Instance:
    return here.alone("alone", environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_what_cannot_be_shared_is_refused_in_one_line_with_what_to_change(alone: Instance) -> None:
    found: dict[str, tuple[str | None, str]] = alone.ask(refusals)
    assert found.pop("as it is") == (None, "in_place")
    assert found.pop("several workers") == (None, "in_place")
    expected = {
        "uncached": (
            "without prefix caching vLLM's KV cache keeps nothing to share: take out "
            "--no-enable-prefix-caching"
        ),
        "sleep": (
            "sleep mode frees nothing of a KV cache that others can map: start vLLM "
            "without --enable-sleep-mode"
        ),
        "cumem": (
            "sleep mode frees nothing of a KV cache that others can map: start vLLM "
            "without --enable-sleep-mode"
        ),
        "expandable": (
            "expandable_segments does not work with the allocator of a shared KV "
            "cache (pytorch issue 147851): take it out of"
        ),
        "machine": (
            "it relies on the order in which x86-64 makes writes visible, and this "
            "machine is aarch64"
        ),
    }
    assert found.keys() == expected.keys()
    for name, (line, share) in found.items():
        assert line is not None
        assert share == "pool"
        assert line.startswith(expected[name])
        assert line.endswith("; or set connector.share: pool")
        assert "\n" not in line


def package() -> Path:
    """vLLM's folder; nothing of it is imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_the_installed_vllm_has_its_hooks_where_they_are_looked_for() -> None:
    assert differences(package()) == []
