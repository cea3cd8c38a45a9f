"""Our entry point in vLLM, `vcache` in the group `vllm.general_plugins`: vLLM calls `register()` in each of its processes, early.

It sets LMCache's hook (lmcache/patches.py), and has the settings of our own connector read before vLLM starts anything: a mistake in
`kv_connector_extra_config` is then the end of vLLM's log. Without it, where `VLLM_PLUGINS` leaves us out, the connector's constructor
finds the mistake: in a process of the engine, whose log goes on.
"""

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
_OURS = "_checks_settings_of_vcache"
log = logging.getLogger(__name__)


def register() -> None:
    """Idempotent, cheap, and never raises."""
    patches.register()
    # The front end's process has it, which calls us from there. The others are handed what came of it.
    made = getattr(sys.modules.get(ARGUMENTS), "EngineArgs", None)
    create = getattr(made, "create_engine_config", None)
    if callable(create) and not hasattr(create, _OURS):
        setattr(made, "create_engine_config", _checking(create))  # noqa: B010 - a class of vLLM's, which mypy does not see


def _checking(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = mistake(getattr(self, "kv_transfer_config", None))
        if found and _is_a_command():
            raise SystemExit(f"vcache: {found}")  # without a traceback, as of any wrong argument
        if found:
            raise ConfigError(found)
        return create(self, *args, **kwargs)

    setattr(create_engine_config, _OURS, True)
    return create_engine_config


def mistake(transfer: Any) -> str:
    """What is wrong with the settings of connectors of ours in vLLM's `kv_transfer_config`, in one line; empty if nothing is."""
    try:
        return next((where + said for where, extra in _connectors(transfer) if (said := _refused(extra))), "")
    except Exception as error:  # noqa: BLE001 - vLLM must start; our connector reads them again
        log.warning("vcache could not read its settings before vLLM starts: %s: %s", type(error).__name__, error)
        return ""


def _refused(extra: Mapping[str, Any]) -> str:
    from .vllm import settings  # only where our connector is asked for

    try:
        settings.read(extra)
    except ConfigError as error:
        return str(error)
    return ""


def _connectors(transfer: Any, where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The `kv_connector_extra_config` of each connector of ours, beside others too, and where it stands."""
    read = transfer.get if isinstance(transfer, Mapping) else functools.partial(_attribute, transfer)
    extra = read("kv_connector_extra_config") or {}
    if read("kv_connector_module_path") == CONNECTOR:
        yield where, extra
    elif read("kv_connector") == "MultiConnector":
        for number, one in enumerate(extra.get("connectors", ())):
            yield from _connectors(one, f"{where}connectors[{number}]: ")


def _attribute(of: Any, name: str) -> Any:
    return getattr(of, name, None)


def _is_a_command() -> bool:
    """Whether this program is vLLM's own: `vllm …`, or a module of it by `python -m`. Others may want to catch what goes wrong."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path("".join(sys.argv[:1])).name == "vllm" or (module is not None and module.name.startswith("vllm."))
