"""Our plugin for vLLM, `vcache` in the group `vllm.general_plugins`: vLLM calls `register()` early
in each of its processes.

The plugin sets the hook for LMCache (lmcache/patches.py), and checks our connector's settings
before vLLM starts anything, so that a mistake in `kv_connector_extra_config` is the last line of
vLLM's log. If `VLLM_PLUGINS` leaves the plugin out, the connector's constructor finds the mistake,
in an engine process, and much of the log follows."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vcache_backend.errors import ConfigError

from .lmcache import patches

ARGUMENTS = "vllm.engine.arg_utils"
CONNECTOR = "vcache_backend.integration.vllm_connector"
log = logging.getLogger(__name__)


def register() -> None:
    """Cheap, and never raises."""
    patches.register()
    # Only the front end has loaded this module. All other processes get the front end's
    # configuration.
    made = getattr(sys.modules.get(ARGUMENTS), "EngineArgs", None)
    create = getattr(made, "create_engine_config", None)
    if callable(create):
        # A class of vLLM, invisible to mypy.
        setattr(made, "create_engine_config", _checking(create))  # noqa: B010


def _checking(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        fault = mistake(getattr(self, "kv_transfer_config", None))
        if fault and _is_a_command():
            raise SystemExit(f"vcache: {fault}")  # without a traceback, as of any wrong argument
        if fault:
            raise ConfigError(fault)
        return create(self, *args, **kwargs)

    return create_engine_config


def mistake(transfer: Any) -> str:
    """The first mistake in our connectors' settings in vLLM's `kv_transfer_config`, in one line, or
    empty. Never raises."""
    try:
        for where, extra in _connectors(transfer):
            from .vllm import settings  # only where our connector is asked for

            try:
                settings.read(extra)
            except ConfigError as error:
                return f"{where}{error}"
    except Exception as error:  # noqa: BLE001 - vLLM must start; our connector reads them again
        said = "vcache could not read its settings before vLLM starts: %s: %s"
        log.warning(said, type(error).__name__, error)
    return ""


def _connectors(transfer: Any, where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The place of each of our connectors, also within MultiConnectors, and its
    `kv_connector_extra_config`."""
    read = (transfer if isinstance(transfer, Mapping) else getattr(transfer, "__dict__", {})).get
    extra = read("kv_connector_extra_config") or {}
    if read("kv_connector_module_path") == CONNECTOR:
        yield where, extra
    elif read("kv_connector") == "MultiConnector":
        for number, inner in enumerate(extra.get("connectors", ())):
            yield from _connectors(inner, f"{where}connectors[{number}]: ")


def _is_a_command() -> bool:
    """Whether this program is vLLM's own: `vllm …`, or a vLLM module by `python -m`. Other programs
    may want to catch the error."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path("".join(sys.argv[:1])).name == "vllm" or (
        module is not None and module.name.startswith("vllm.")
    )
