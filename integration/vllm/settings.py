"""Reads our settings from `kv_connector_extra_config`: a file's path, sections written in place, or
both."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vcache_backend import config as configuration
from vcache_backend.config import Config
from vcache_backend.errors import ConfigError

SOURCE = "kv_connector_extra_config"


def read(
    extra_config: Mapping[str, Any],
    where: str = SOURCE,
    defaults: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> Config:
    """Read the configuration. Sections in `extra_config`, such as `server` or `pool`, override the
    file that `config` names. where: the errors' name for `extra_config`. defaults: sections with
    values for missing settings.

    Without `config` the file is `VCACHE_CONFIG`. ConfigError names an unknown key or an impossible
    value."""
    values, source, lines = configuration.read(extra_config.get("config"))
    configuration.from_dict(values, source, lines)
    for name, section in defaults.items():
        values[name] = {**section, **values.get(name, {})}
    for name, section in extra_config.items():
        if name == "config":
            continue
        is_section = name in Config.__struct_fields__
        if is_section and not isinstance(section, Mapping):
            raise ConfigError(
                f"{where}: {name}: Expected a section of settings, got {section!r:.80}"
            )
        values[name] = {**values.get(name, {}), **section} if is_section else section
    return configuration.from_dict(values, where)
