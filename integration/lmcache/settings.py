"""Reads our settings from `vcache` in LMCache's `extra_config`: the same settings as in
`kv_connector_extra_config` for our own connector (`..vllm.settings`).

Of the section `connector` the plugin uses `model` and `start_server`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vcache_backend.config import Config
from vcache_backend.errors import ConfigError

from ..vllm import settings

KEY = "vcache"
SOURCE = f"{KEY} in LMCache's extra_config"


def read(extra_config: Mapping[str, Any], chunk_size: int) -> Config:
    """Read the configuration. Other keys of `extra_config` are not ours. chunk_size: of LMCache,
    adopted by us.

    ConfigError names an unknown key, an impossible value, or another chunk size."""
    given = extra_config.get(KEY, {})
    flat = [key for key in extra_config if str(key).startswith(f"{KEY}.")]
    if flat or not isinstance(given, Mapping):
        wrong = flat[0] if flat else f"{KEY} is {given!r}"
        raise ConfigError(f"LMCache's extra_config: {wrong}: write `{KEY}:` and sections under it")
    config = settings.read(given, SOURCE, {"engine": {"chunk_size": chunk_size}})
    if config.connector.share == "in_place":
        raise ConfigError(f"{SOURCE}: connector.share is in_place: LMCache has a pool only")
    if (size := config.engine.chunk_size) != chunk_size:
        other = f"engine.chunk_size is {size} but LMCache's chunk_size is {chunk_size}"
        raise ConfigError(f"{SOURCE}: {other}, which is used: remove ours")
    return config
