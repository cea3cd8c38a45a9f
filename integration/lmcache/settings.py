"""Reads our settings from LMCache's `extra_config`: flat keys that begin with `vcache.`.

`vcache.SECTION.KEY` is one value of our own configuration (`vcache.server.socket`,
`vcache.pool.segment_bytes`, ...). `vcache.config` is the path of a configuration file, by default
`VCACHE_CONFIG`; single values override it. The section `connector` is not for LMCache's connector:
in a file it is ignored, as a key it is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from vcache_backend import config as configuration
from vcache_backend.config import Config
from vcache_backend.errors import ConfigError

PREFIX = "vcache."
SOURCE = "LMCache's extra_config"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The plugin's settings.

    block_size: tokens of a KV block, for engines other than vLLM; 0: ask vLLM. model: a name for
    the weights, for instances with the same weights under different paths; empty: the serving
    engine's name. start_server: start a metadata server if none serves the socket."""

    config: Config
    block_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    model: str = ""
    start_server: bool = False


def read(extra_config: Mapping[str, Any], chunk_size: int) -> Settings:
    """Read the settings in `extra_config`; keys that do not begin with `vcache.` are ignored.
    chunk_size: LMCache's, which becomes ours.

    ConfigError names an unknown key, an impossible value, or another chunk size."""
    if "vcache" in extra_config:
        raise ConfigError(
            f"{SOURCE}: vcache: write flat keys, such as vcache.server.socket, no mapping"
        )
    given = {
        key.removeprefix(PREFIX): value
        for key, value in extra_config.items()
        if key.startswith(PREFIX)
    }
    values, file, lines = configuration.read(given.pop("config", None))
    names = given.keys() & set(Settings.__struct_fields__)
    own = {name: given.pop(name) for name in names}
    configuration.from_dict(values, file, lines)
    values["connector"] = {}
    for key, value in given.items():
        _put(values, key, value)
    ours = values.setdefault("engine", {}).setdefault("chunk_size", chunk_size)
    if ours != chunk_size:
        where = SOURCE if "engine.chunk_size" in given else file
        raise ConfigError(
            f"{where}: engine.chunk_size is {ours} but LMCache's chunk_size is {chunk_size}, "
            "which counts: leave ours out"
        )
    config = configuration.from_dict(values, SOURCE)
    configuration.check_socket_is_whole(config, SOURCE)
    try:
        return msgspec.convert({"config": config, **own}, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{SOURCE}: {str(error).replace('$.', PREFIX)}") from error


def _put(values: dict[str, Any], key: str, value: object) -> None:
    """Set the value that `key` names, such as `pool.device`. ConfigError without such a section."""
    *path, name = key.split(".")
    section: Any = values
    for part in path:
        section = section.setdefault(part, {}) if isinstance(section, dict) else None
    if not isinstance(section, dict) or path[:1] in ([], ["connector"]):
        raise ConfigError(f"{SOURCE}: {PREFIX}{key} is no setting of vcache for LMCache")
    section[name] = value
