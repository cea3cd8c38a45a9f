"""Our settings in LMCache's `extra_config`: flat keys that begin with `vcache.`.

`vcache.SECTION.KEY` is one value of our own configuration (`vcache.server.socket`, `vcache.pool.segment_bytes`, ...) and
`vcache.config` the path of a file of it; the single values count more than the file. Without that path the file is
`VCACHE_CONFIG`'s, as everywhere. Text is taken as a number, a switch or a list where one is wanted: LMCache's settings may come
from environment variables.
"""

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
    """What the plugin was told.

    block_size: tokens a KV block, for engines that are not vLLM; 0: ask vLLM. model: names the weights, for instances that see
    the same ones under different paths; empty: as the serving engine names them. start_server: have a metadata server started where
    nobody serves.
    """

    config: Config
    block_size: int = 0
    model: str = ""
    start_server: bool = False


class _Own(msgspec.Struct, rename=lambda name: PREFIX + name):
    """The settings that are no part of our own configuration."""

    config: str = ""
    block_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    model: str = ""
    start_server: bool = False


def read(extra_config: Mapping[str, Any], chunk_size: int) -> Settings:
    """The settings among `extra_config`; keys that do not begin with `vcache.` are others'. `chunk_size`: LMCache's, which counts.

    Raises ConfigError, which names the key as it is written: unknown, impossible, or a chunk size that differs.
    """
    given = {key: value for key, value in extra_config.items() if str(key).startswith(PREFIX)}
    if "vcache" in extra_config:
        raise ConfigError(f"{SOURCE}: vcache: write flat keys, such as vcache.server.socket, not a mapping under vcache")
    try:
        own = msgspec.convert(given, _Own, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{SOURCE}: {error}") from error
    base = _checked(*configuration.read(own.config or None))
    values = configuration.dump(base)
    # `dump` writes the default socket out, which is no setting of anybody's.
    values["server"]["socket"] = base.server.socket
    for key in given.keys() - set(_Own.__struct_encode_fields__):
        _put(values, key, given[key])
    _agree(values["engine"], chunk_size, PREFIX + "engine.chunk_size" in given, own.config)
    config = _checked(values, SOURCE)
    return Settings(config=config, block_size=own.block_size, model=own.model, start_server=own.start_server)


def _checked(values: dict[str, Any], *source: Any) -> Config:
    """Without the section of our connector in vLLM, which nobody reads here: `share: in_place` would have nothing lent."""
    configuration.from_dict(values, *source)
    return configuration.from_dict({**values, "connector": {}}, *source)


def _put(values: dict[str, Any], key: str, value: object) -> None:
    """Set the value that `key` names, which must be there: every default is written out."""
    known = list(_names(values, PREFIX))
    if key not in known:
        near = difflib.get_close_matches(key, [*_Own.__struct_encode_fields__, *known], n=1, cutoff=0.75)
        advice = (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(_Own.__struct_encode_fields__)} and vcache.SECTION.KEY"
        )
        raise ConfigError(f"{SOURCE}: {key} is no setting of vcache; {advice}")
    *path, name = key.removeprefix(PREFIX).split(".")
    for part in path:
        values = values[part]
    values[name] = _plain(value) if isinstance(value, str) and not isinstance(values[name], str) else value


def _names(values: dict[str, Any], above: str) -> Iterator[str]:
    for name, value in values.items():
        yield from _names(value, f"{above}{name}.") if isinstance(value, dict) else [above + name]


def _plain(text: str) -> object:
    """A number, switch or list written as text; other text as it is, for `from_dict` to judge."""
    stripped = text.strip()
    try:
        return msgspec.json.decode(stripped.lower() if stripped in ("True", "False") else stripped)
    except msgspec.DecodeError:
        return text


def _agree(engine: dict[str, Any], chunk_size: int, written: bool, path: str) -> None:
    """LMCache's chunk size becomes ours. Another one in ours is a mistake; the default in a file is nobody's choice."""
    ours = engine["chunk_size"]
    if ours != chunk_size and (written or ours != EngineConfig().chunk_size):
        where = f"{SOURCE}: {PREFIX}engine.chunk_size" if written else f"{path or 'VCACHE_CONFIG'}: engine.chunk_size"
        raise ConfigError(f"{where} is {ours} but LMCache's chunk_size is {chunk_size}, which counts: leave ours out")
    engine["chunk_size"] = chunk_size
