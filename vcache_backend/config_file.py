"""Settings as a person wrote them: the line of each key, none twice, and what was meant where one is wrong."""

from __future__ import annotations

import re
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from vcache_backend.errors import ConfigError

_DEEPEST = 8
"""Sections in sections; an alias may hold itself."""
_LONGEST = 80
"""Characters of a value that an error shows."""


def lines(text: bytes, source: str) -> dict[str, int]:
    """The line of each key of a YAML text by its path, such as `.pool.device`. Raises ConfigError where one is there twice."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node | None, at: str) -> None:
        if not isinstance(node, yaml.MappingNode) or at.count(".") > _DEEPEST:
            return
        for key, value in node.value:
            path, line = f"{at}.{key.value}", key.start_mark.line + 1
            if not key.tag.endswith((":str", ":merge")):
                raise ConfigError(f"{source}: line {line}: a key is a name, and this is none to YAML: {key.value!r}")
            if path in found and key.value != "<<":
                raise ConfigError(f"{source}: line {line}: `{path[1:]}` is there again, after line {found[path]}; remove one")
            found[path] = line
            walk(value, path)

    walk(yaml.compose(text, Loader=yaml.SafeLoader), "")
    return found


def not_yaml(error: msgspec.DecodeError, text: bytes) -> str:
    """What YAML's reader says of a text that is none, in one line, with the line of the text."""
    told = error.__context__
    if isinstance(told, yaml.reader.ReaderError):
        at = len(text[: told.position].splitlines())
        return f"line {max(1, at)}: not YAML: {told.reason}"
    said, mark = getattr(told, "problem", None) or str(error).partition("\n")[0], getattr(told, "problem_mark", None)
    return (f"line {min(mark.line, len(text.splitlines()) - 1) + 1}: " if mark is not None else "") + f"not YAML: {said}"


def line(where: dict[str, int], path: str) -> str:
    """To put before what is said of a key, such as `.pool.device`; empty where the file does not have it."""
    return f"line {where[path]}: " if path in where else ""


def explained(error: str, kind: type, where: dict[str, int], values: object = None) -> str:
    """What msgspec says of a value in `values` that should have been a `kind`, with its line, what it is, and what could stand there."""
    found, unknown = re.search(r"at `\$([^`]*)", error), re.search(r"unknown field `(.+?)`", error)
    steps = re.findall(r"\w+", found[1]) if found else []
    path = "".join(f".{step}" for step in steps if not step.isdecimal())
    expected: Any = kind
    for name in steps:
        expected = _fields(expected).get(name)
    hint, names = "", list(_fields(expected))
    if unknown:
        hint = f"; {_near(unknown[1], names, kind)}"
        path += f".{unknown[1]}"
    elif get_origin(expected) is Literal:
        hint = f"; expected {' or '.join(map(str, get_args(expected)))}"
    elif "got `null`" in error and names:
        hint = "; nothing stands under it: remove it"
    elif "`, got `str`" in error:
        hint = next((text for type_, text in _NO_TEXT.items() if f"`{type_}" in error), "")
    elif named := [word for word in re.findall(r"\w+", error) if word in names]:
        # Of a section, whose check begins with the key that it is about; its other key may be the one that is there.
        path += "." + next((name for name in named if f"{path}.{name}" in where), named[0])
    return (line(where, path) or line(where, path.rpartition(".")[0])) + error + _given(error, values, steps) + hint


_NO_TEXT = {"bool": "; write true or false", "int": "; write digits, without quotes", "float": "; write digits, 0.001 for 1e-3"}
"""What to write where text is not meant. In YAML quotes make text, and so does a number with an exponent and no point."""


def _near(name: str, names: list[str], kind: type) -> str:
    """What was meant by a key that is none of `names`."""
    if close := get_close_matches(name, names, 1):
        return f"did you mean `{close[0]}`?"
    elsewhere = [path for path in _paths(kind) if path.rpartition(".")[2] == name.rpartition(".")[2]]
    return f"did you mean `{'` or `'.join(elsewhere)}`?" if elsewhere else f"there are {', '.join(names)}"


def _paths(kind: Any, at: str = "") -> list[str]:
    """All keys, with their sections."""
    return [path for name, one in _fields(kind).items() for path in (f"{at}{name}", *_paths(one, f"{at}{name}."))]


def _given(error: str, value: Any, steps: list[str]) -> str:
    """The value that is wrong, unless it is said already, or is long."""
    with suppress(LookupError, TypeError, ValueError):
        for step in steps:
            value = value[int(step)] if isinstance(value, list) else value[step]
        if steps and isinstance(value, str | int | float) and repr(value) not in error and len(repr(value)) <= _LONGEST:
            return f", which is {value!r}"
    return ""


def _fields(kind: Any) -> dict[str, Any]:
    return {one.name: one.type for one in msgspec.structs.fields(kind)} if isinstance(kind, type(msgspec.Struct)) else {}
