"""Settings as a person wrote them: the line of each key, none twice, and what was meant where one is wrong."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from vcache_backend.errors import ConfigError

_DEEPEST = 8
"""Sections in sections; an alias may hold itself."""


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


def explained(error: str, kind: type, where: dict[str, int]) -> str:
    """What msgspec says of a value that should have been a `kind`, with its line, and with what could stand there."""
    found, unknown = re.search(r"at `\$((?:\.\w+)*)", error), re.search(r"unknown field `(.+?)`", error)
    path = found[1] if found else ""
    expected: Any = kind
    for name in path.split(".")[1:]:
        expected = _fields(expected).get(name)
    hint, names = "", list(_fields(expected))
    if unknown:
        path += f".{unknown[1]}"
        close = get_close_matches(unknown[1], names, 1)
        hint = f"; did you mean `{close[0]}`?" if close else f"; there are {', '.join(names)}"
    elif get_origin(expected) is Literal:
        hint = f"; expected {' or '.join(map(str, get_args(expected)))}"
    elif "got `null`" in error and names:
        hint = "; nothing stands under it: remove it"
    elif (named := error.partition(" ")[0]) in names:
        path += f".{named}"  # of a section, whose check begins with the key that it is about
    return line(where, path) + error + hint


def _fields(kind: Any) -> dict[str, Any]:
    return {one.name: one.type for one in msgspec.structs.fields(kind)} if isinstance(kind, type(msgspec.Struct)) else {}
