"""Reads YAML strictly, and explains mistakes in configuration files."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from vcache_backend.errors import ConfigError, printable


def parse(text: bytes, source: str) -> tuple[Any, dict[str, int]]:
    """Read a YAML text. Returns the value, and the line of each key by its path, such as
    `.pool.device`.

    ConfigError, with the mistake's line if known: no YAML, or a key that occurs twice or is not a
    string."""
    lines: dict[str, int] = {}
    try:
        _note(yaml.compose(text, yaml.SafeLoader), "", lines, set())
        return yaml.safe_load(text), lines
    except RecursionError as error:
        raise ConfigError(f"{source}: not valid YAML: it is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        said = ", ".join(filter(None, (error.context, error.problem)))
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{source}: {line}not valid YAML: {printable(said, 200)}") from error
    # by PyYAML: an impossible number or date
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        said = str(error).partition("\n")[0]
        raise ConfigError(f"{source}: not valid YAML: {said}; quote it if it is text") from error


def _note(node: yaml.Node | None, path: str, lines: dict[str, int], seen: set[int]) -> None:
    """Note the line of each key below `node`, once, however many aliases it has."""
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return
    seen.add(id(node))
    for key, value in node.value:
        at = f"{path}.{key.value}"
        if not key.tag.endswith(":str"):
            _refuse(key, f"a key must be a name, got {key.value!r}")
        if at in lines:
            _refuse(key, f"`{at[1:]}` is there again, after line {lines[at]}; remove one")
        lines[at] = key.start_mark.line + 1
        _note(value, at, lines, seen)


def _refuse(at: Any, said: str) -> None:
    raise yaml.MarkedYAMLError(problem=said, problem_mark=at.start_mark)


def explained(error: str, kind: type, lines: dict[str, int]) -> str:
    """msgspec's `error` with the line before it, and a hint behind it.

    kind: the struct that was expected. lines: see `parse`."""
    place = re.search(r"at `\$([\w.]*)", error)
    path, hint, expected = place[1] if place else "", "", kind
    for name in path.split(".")[1:]:
        expected = _fields(expected).get(name, object)
    if unknown := re.search(r"unknown field `(.+?)`", error, re.DOTALL):
        known = list(_fields(expected))
        close = get_close_matches(unknown[1], known, 1)
        hint = f"; did you mean `{close[0]}`?" if close else f"; there are {', '.join(known)}"
    elif get_origin(expected) is Literal:
        hint = f"; expected {' or '.join(map(str, get_args(expected)))}"
    elif _fields(expected) and "got `null`" in error:
        hint = "; remove the empty section"
    elif re.match(r"Expected `str( \| null)?`, got `(int|float|bool)`", error):
        hint = "; quote it"
    elif re.match(r"Expected `(int|float)( \| null)?`, got `str`", error):
        hint = "; write a number alone, without a unit"
    # The error of a section's own check, or of an unknown field, names the key.
    named = (f"{path}.{word}" for word in re.findall(r"\w+", error))
    line = lines.get(next((key for key in named if key in lines), path))
    return f"{f'line {line}: ' if line else ''}{error}{hint}"


def _fields(kind: Any) -> dict[str, Any]:
    is_section = isinstance(kind, type(msgspec.Struct))
    return {field.name: field.type for field in msgspec.structs.fields(kind)} if is_section else {}
