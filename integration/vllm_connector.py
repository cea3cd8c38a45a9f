"""The module in which vLLM finds our connectors: by the names that our plugin registers
(plugin.py), or by `kv_connector_module_path`, which works without the plugin, too.

With a vLLM that vcache does not know and that has another shape (`shapes`), `VCacheConnector` does
nothing, and `VCacheMultiConnector` is vLLM's own, in which the other connectors go on."""

from __future__ import annotations

import inspect
import logging
from contextlib import suppress
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from vcache_backend.config import over_file
from vcache_backend.supported import VLLM

from . import around_vllm, plugin
from .vllm.boundary import Boundary

# MultiConnector finds the class that reads a connector's statistics by the registered name only.
plugin.register_name()


def _connector() -> tuple[Any, str]:
    """Our class, or why it cannot be used with this vLLM."""
    try:
        from .vllm.connector import VCacheConnector as found

        if VLLM.supports(vllm.__version__):
            return found, ""
        from .vllm.shapes import fault

        return found, fault(found)
    except Exception as error:  # noqa: BLE001 - vLLM serves without
        return None, f"{type(error).__name__}: {error}"


class Idle(Boundary, base.KVConnectorBase_V1, getattr(base, "SupportsHMA", object)):  # type: ignore[misc]
    """A connector that caches nothing. vLLM's own defaults answer, whatever it asks."""

    def __init__(self, vllm_config: Any, role: Any, *given: Any, **more: Any) -> None:
        base.KVConnectorBase_V1.__init__(self, vllm_config, role, *given, **more)
        Boundary.__init__(self, "the connector", says=role == base.KVConnectorRole.SCHEDULER)
        with suppress(Exception):  # whatever else has changed
            around_vllm.join_log()
            self.config = over_file(vllm_config.kv_transfer_config.kv_connector_extra_config)
        known = f"vLLM {vllm.__version__} is not the one that vcache knows"
        self.fail(f"{known}: {_fault}; install {VLLM.name}{VLLM.wanted}, or a later vcache")


def _answer(wanted: str) -> Any:
    """What means nothing where vLLM wants this type."""
    if "tuple[" in wanted:
        return (0, False) if "tuple[int" in wanted else (False, None)
    return base.KVConnectorMetadata() if wanted.endswith("KVConnectorMetadata") else None


for _name in Idle.__abstractmethods__:
    _wanted = inspect.signature(getattr(Idle, _name)).return_annotation
    _made = _answer(inspect.formatannotation(_wanted).strip("'"))
    setattr(Idle, _name, lambda *_, made=_made, **__: made)
Idle.__abstractmethods__ = frozenset()
VCacheConnector, _fault = _connector()
if _fault:
    VCacheConnector = Idle


def _beside() -> Any:
    """Our class for several connectors, or vLLM's own if ours cannot be used with this vLLM."""
    if not _fault:
        try:
            from .vllm.multi import VCacheMultiConnector as found

            return found
        except Exception:
            log = logging.getLogger("vllm.vcache")
            log.exception("vcache cannot stand beside other connectors")
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    return MultiConnector


VCacheMultiConnector = _beside()

__all__ = ["VCacheConnector", "VCacheMultiConnector"]
