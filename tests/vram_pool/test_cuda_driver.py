"""The driver that cannot be loaded. All other calls: test_regions, test_host_memory, test_exports."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import pytest
from fake_cuda import GPU0, MIB, cuda

from vcache_backend.errors import ConfigError, SegmentError
from vcache_backend.vram_pool import cuda_driver, devices
from vcache_backend.vram_pool.regions import create

__all__ = ["cuda"]


def test_missing_bindings_are_a_line_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(devices, "current_gpu", lambda: 0)
    monkeypatch.setattr(cuda_driver, "load", cuda_driver.load.__wrapped__)
    said = r"pip install 'cuda-bindings==13\.\*'"
    for ask in (lambda: create(GPU0, MIB), devices.gpus, lambda: devices.resolve("auto")):
        with pytest.raises((SegmentError, ConfigError), match=said) as caught:
            cast(Callable[[], object], ask)()
        assert "\n" not in str(caught.value)
