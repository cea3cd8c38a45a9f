"""Reads our settings from LMCache's `extra_config`: flat keys that begin with `vcache.`.

`vcache.SECTION.KEY` is one value of our own configuration (`vcache.server.socket`,
`vcache.pool.segment_bytes`, ...). `vcache.config` is the path of a configuration file, by default
`VCACHE_CONFIG`; single values override it. Text is converted to a number, a switch or a list where
the setting needs one, since LMCache's settings may come from environment variables."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from vcache_backend import config as configuration
from vcache_backend.config import Config, EngineConfig
from vcache_backend.errors import ConfigError

PREFIX = "vcache."
SOURCE = "LMCache's extra_config"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The plugin's settings.

    block_size: tokens of a KV block, for engines other than vLLM; 0: ask vLLM. model: a name for
    the weights, for instances with the same weights under different paths; empty: the serving
    engine's name. start_server: start a metadata server if none serves the socket."""

    config: Config
    block_size: int = 0
    model: str = ""
    start_server: bool = False


class _Own(msgspec.Struct, rename=lambda name: PREFIX + name):
    """The keys that are not part of vcache's own configuration."""

    config: str = ""
    block_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    model: str = ""
    start_server: bool = False


def read(extra_config: Mapping[str, Any], chunk_size: int) -> Settings:
    """Read the settings in `extra_config`; keys that do not begin with `vcache.` are ignored.
    chunk_size: LMCache's, which becomes ours.

    ConfigError names an unknown key, an impossible value, or another chunk size."""
    given = {key: value for key, value in extra_config.items() if str(key).startswith(PREFIX)}
    if "vcache" in extra_config:
        raise ConfigError(
            f"{SOURCE}: vcache: write flat keys, such as vcache.server.socket, not a mapping "
            "under vcache"
        )
    try:
        own = msgspec.convert(given, _Own, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{SOURCE}: {error}") from error
    base = _checked(*configuration.read(own.config or None))
    values = configuration.dump(base)
    # `dump` writes the default socket out, though nobody has set it.
    values["server"]["socket"] = base.server.socket
    for key in given.keys() - set(_Own.__struct_encode_fields__):
        _put(values, key, given[key])
    _agree(values["engine"], chunk_size, PREFIX + "engine.chunk_size" in given, own.config)
    config = _checked(values, SOURCE)
    configuration.check_socket_is_whole(config, SOURCE)
    return Settings(
        config=config, block_size=own.block_size, model=own.model, start_server=own.start_server
    )


def _checked(values: dict[str, Any], *source: Any) -> Config:
    """Check the configuration, and reset `connector` to its defaults: LMCache's connector reads no
    such settings, and with `share: in_place` nothing would be lent to the pool.
    """
    configuration.from_dict(values, *source)
    return configuration.from_dict({**values, "connector": {}}, *source)


def _put(values: dict[str, Any], key: str, value: object) -> None:
    """Set the value that `key` names. ConfigError if `values`, which contains every default, lacks
    it.
    """
    names = list(_names(values, PREFIX))
    if key not in names:
        near = difflib.get_close_matches(
            key, [*_Own.__struct_encode_fields__, *names], n=1, cutoff=0.75
        )
        advice = (
            f"did you mean {near[0]}?"
            if near
            else f"there are {', '.join(_Own.__struct_encode_fields__)} and vcache.SECTION.KEY"
        )
        raise ConfigError(f"{SOURCE}: {key} is no setting of vcache; {advice}")
    *path, name = key.removeprefix(PREFIX).split(".")
    for part in path:
        values = values[part]
    values[name] = (
        _plain(value) if isinstance(value, str) and not isinstance(values[name], str) else value
    )


def _names(values: dict[str, Any], above: str) -> Iterator[str]:
    for name, value in values.items():
        yield from _names(value, f"{above}{name}.") if isinstance(value, dict) else [above + name]


def _plain(text: str) -> object:
    """Parse `text` as a number, switch or list. Other text stays unchanged, for `from_dict` to
    judge.
    """
    stripped = text.strip()
    try:
        return msgspec.json.decode(stripped.lower() if stripped in ("True", "False") else stripped)
    except msgspec.DecodeError:
        return text


def _agree(engine: dict[str, Any], chunk_size: int, written: bool, path: str) -> None:
    """Use LMCache's chunk size. ConfigError if the user has set another one; our default in a file
    does not count.
    """
    ours = engine["chunk_size"]
    if ours != chunk_size and (written or ours != EngineConfig().chunk_size):
        where = (
            f"{SOURCE}: {PREFIX}engine.chunk_size"
            if written
            else f"{path or 'VCACHE_CONFIG'}: engine.chunk_size"
        )
        raise ConfigError(
            f"{where} is {ours} but LMCache's chunk_size is {chunk_size}, which counts: leave "
            "ours out"
        )
    engine["chunk_size"] = chunk_size
