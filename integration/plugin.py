"""Our plugin for vLLM, `vcache` in the group `vllm.general_plugins`: vLLM calls `register()` early
in each of its processes.

The plugin registers our connector's name, so that `kv_connector` alone selects it, sets the hook
for LMCache (lmcache/hooks.py), and checks our connector's settings before vLLM starts anything, so
that a mistake in `kv_transfer_config` is the last line of vLLM's log.

If `VLLM_PLUGINS` leaves the plugin out, vLLM finds our connector only by its
`kv_connector_module_path`, and the connector finds a mistake in its own settings in an engine
process, where much of the log follows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vcache_backend.errors import ConfigError, printable

from .hooks import after_import, replace

ARGUMENTS = "vllm.engine.arg_utils"
LMCACHE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
CONNECTOR, CLASS = "vcache_backend.integration.vllm_connector", "VCacheConnector"
BESIDE = "VCacheMultiConnector"
"""The class that puts our connector beside others."""
log = logging.getLogger(__name__)


def register() -> None:
    """Cheap. Never raises."""
    register_name()
    after_import(LMCACHE, _hook_into)
    # Only the front end has loaded this module. All other processes get the front end's
    # configuration.
    made = getattr(sys.modules.get(ARGUMENTS), "EngineArgs", None)
    if callable(getattr(made, "create_engine_config", None)):
        replace(made, "create_engine_config", _checking)


def register_name() -> None:
    """Register our classes in vLLM's factory, as soon as vLLM imports the factory. Idempotent,
    cheap, and never raises."""
    after_import(FACTORY, _register_in)


def _hook_into(module: Any) -> None:
    from .lmcache import hooks  # only where LMCache's connector is asked for

    hooks.wrap(module)


def _register_in(module: Any) -> None:
    try:
        for name in (CLASS, BESIDE):
            with suppress(ValueError):  # registered already
                module.KVConnectorFactory.register_connector(name, CONNECTOR, name)
    except Exception as error:  # noqa: BLE001 - vLLM must start
        said = "vcache: vLLM finds %s only by kv_connector_module_path (%s): %s"
        log.warning(said, CLASS, CONNECTOR, error)


def _checking(create: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if fault := mistake(getattr(self, "kv_transfer_config", None)):
            # vLLM's own command ends without a traceback, as for any wrong argument.
            raise SystemExit(f"vcache: {fault}") if _is_a_command() else ConfigError(fault)
        return create(self, *args, **kwargs)

    return create_engine_config


def mistake(transfer: Any) -> str:
    """The first mistake in our connectors' settings in vLLM's `kv_transfer_config`, in one line, or
    empty. Never raises."""
    try:
        for where, told in _connectors(transfer):
            from vcache_backend.config import over_file  # only where our connector is asked for

            if fault := misplaced(told):
                return f"{where}{fault}"
            if told.get("kv_connector") == BESIDE:
                continue
            try:
                over_file(told.get("kv_connector_extra_config") or {})
            except ConfigError as error:
                return f"{where}{error}"
    except Exception as error:  # noqa: BLE001 - vLLM must start; our connector reads them again
        said = "vcache could not read its settings before vLLM starts: %s: %s"
        log.warning(said, type(error).__name__, error)
    return ""


def _connectors(transfer: Any, where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each of our connectors, also within MultiConnectors: its place, and vLLM's settings of it."""
    told = transfer if isinstance(transfer, Mapping) else getattr(transfer, "__dict__", {})
    if told.get("kv_connector") in (CLASS, BESIDE):
        yield where, told
    if told.get("kv_connector") in ("MultiConnector", BESIDE):
        extra = told.get("kv_connector_extra_config") or {}
        for number, inner in enumerate(extra.get("connectors", ())):
            yield from _connectors(inner, f"{where}connectors[{number}]: ")


def misplaced(transfer: Any) -> str:
    """What is wrong with the connectors that a `VCacheMultiConnector` has inside, or empty."""
    told = transfer if isinstance(transfer, Mapping) else vars(transfer)
    if told.get("kv_connector") != BESIDE:
        return ""
    inside = (told.get("kv_connector_extra_config") or {}).get("connectors")
    names = [str(one.get("kv_connector")) for one in inside or () if isinstance(one, Mapping)]
    where = f"kv_connector_extra_config.connectors of {BESIDE}"
    if len(names) < 2:
        return f"{where} must name {CLASS} and another connector: {_shown(names or None)}"
    if names[0] != CLASS:
        return f"{where} must begin with {CLASS}, not {_shown(names[0])}"
    twice = [name for name in names[1:] if name in (CLASS, BESIDE)]
    return f"{where} has {_shown(twice[0])}, too: once is enough" if twice else ""


def _shown(value: Any) -> str:
    return "not set" if value is None else f"`{printable(str(value))}`"


def _is_a_command() -> bool:
    """Whether this program is vLLM's own: `vllm …`, or a vLLM module by `python -m`. Other programs
    may want to catch the error."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path("".join(sys.argv[:1])).name == "vllm" or (
        module is not None and module.name.startswith("vllm.")
    )
