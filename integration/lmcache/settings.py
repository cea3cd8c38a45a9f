"""Our settings in LMCache's `extra_config`: flat keys that begin with `vcache.`.

`vcache.SECTION.KEY` is one value of our own configuration (`vcache.server.socket`, `vcache.pool.segment_bytes`, ...) and
`vcache.config` the path of a file of it; the single values count more than the file. Without that path the file is
`VCACHE_CONFIG`'s, as everywhere. Text is taken as a number, a switch or a list where one is wanted: LMCache's settings may come
from environment variables.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from vcache_backend import config as configuration
from vcache_backend.config import Config, EngineConfig
from vcache_backend.errors import ConfigError

PREFIX = "vcache."
SOURCE = "LMCache's extra_config"
_OWN = ("config", "block_size", "model", "start_server")


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


def read(extra_config: Mapping[str, Any], chunk_size: int) -> Settings:
    """The settings among `extra_config`; keys that do not begin with `vcache.` are others'. `chunk_size`: LMCache's, which counts.

    Raises ConfigError, which names the key as it is written: unknown, impossible, or a chunk size that differs.
    """
    given = {key: value for key, value in extra_config.items() if str(key).startswith(PREFIX)}
    if "vcache" in extra_config:
        raise ConfigError(f"{SOURCE}: vcache: write flat keys, such as vcache.server.socket, not a mapping under vcache")
    path = _own(given, "config", str, "")
    base = configuration.load(path or None)
    values = configuration.dump(base)
    # `dump` writes the default socket out, which is no setting of anybody's.
    values["server"]["socket"] = base.server.socket
    for key, value in given.items():
        name = key.removeprefix(PREFIX)
        if name not in _OWN:
            _put(values, key, value)
    _agree(values["engine"], chunk_size, PREFIX + "engine.chunk_size" in given, path)
    return Settings(
        config=configuration.from_dict(values, SOURCE),
        block_size=_own(given, "block_size", Annotated[int, msgspec.Meta(ge=0)], 0),
        model=_own(given, "model", str, ""),
        start_server=_own(given, "start_server", bool, False),
    )


def _put(values: dict[str, Any], key: str, value: object) -> None:
    """Set the value that `key` names, which must be there: every default is written out."""
    *path, name = key.removeprefix(PREFIX).split(".")
    section: Any = values
    for part in path:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict) or name not in section:
        raise ConfigError(f"{SOURCE}: {key} is no setting of vcache{_advice(key)}")
    if isinstance(section[name], dict):
        raise ConfigError(f"{SOURCE}: {key} is a section; write its keys one by one{_advice(key + '.')}")
    section[name] = _plain(value) if isinstance(value, str) and not isinstance(section[name], str) else value


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


def _own(given: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = given.get(PREFIX + name, default)
    try:
        return msgspec.convert(_plain(value) if isinstance(value, str) and kind is not str else value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{SOURCE}: {PREFIX}{name}: {error}") from error


def _advice(key: str) -> str:
    """The settings that look most like `key`."""
    near = difflib.get_close_matches(key, _known(), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(_known()[: len(_OWN)])} and vcache.SECTION.KEY"


def _known() -> list[str]:
    def names(values: dict[str, Any], above: str) -> list[str]:
        found = []
        for name, value in values.items():
            found += names(value, f"{above}{name}.") if isinstance(value, dict) else [above + name]
        return found

    return [PREFIX + name for name in _OWN] + names(configuration.dump(Config()), PREFIX)
