"""Reads YAML, and explains mistakes in configuration files: the lines, and likely corrections."""

from __future__ import annotations

import re
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from vcache_backend.errors import MAX_SHOWN_CHARS, ConfigError

_DEEPEST = 8
"""The deepest nesting of a YAML text. PyYAML's parser recurses in C, and ends the process some ten
thousand levels down."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(text: bytes, source: str) -> tuple[Any, dict[str, int]]:
    """Read a YAML text. Returns the value, and the line of each key by path, such as
    `.pool.device`. ConfigError, with the mistake's line if known."""
    _refuse_endless(text, source)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = _lines(node, source)
        return None if node is None else loader.construct_document(node), lines
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {_not_yaml(error, text)}") from error
    # by PyYAML: a number or a date that is none
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{source}: not YAML: {error}; put it in quotes if it is text") from error


def _refuse_endless(text: bytes, source: str) -> None:
    """Raise ConfigError for YAML that takes endless time or memory to read: aliases, which can
    stand for a thousand times as much text, and deep nesting. Text that is not YAML passes."""
    depth = 0
    event: Any
    with suppress(yaml.YAMLError):
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            at = f"{source}: line {event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent):
                said = "is an alias: write the value itself, or put it in quotes if it is text"
                raise ConfigError(f"{at}: *{str(event.anchor)[:MAX_SHOWN_CHARS]} {said}")
            if depth > _DEEPEST:
                raise ConfigError(f"{at}: the sections are nested too deeply")


def _lines(document: yaml.Node | None, source: str) -> dict[str, int]:
    """The line of each key, by path. Raises ConfigError: a key occurs twice, or is no text."""
    line_of: dict[str, int] = {}

    def walk(node: yaml.Node | None, at: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # no key of a dict: PyYAML refuses it
            path, line = f"{at}.{key.value}", key.start_mark.line + 1
            if not key.tag.endswith(":str"):
                said = f"a key is a name, and this is none to YAML: {key.value!r}"
                raise ConfigError(f"{source}: line {line}: {said}")
            if path in line_of:
                said = f"`{path[1:]}` is there again, after line {line_of[path]}; remove one"
                raise ConfigError(f"{source}: line {line}: {said}")
            line_of[path] = line
            walk(value, path)

    walk(document, "")
    return line_of


def _not_yaml(error: yaml.YAMLError, text: bytes) -> str:
    """Why `text` is not YAML, in one line that begins with the mistake's line, if known."""
    if isinstance(error, yaml.reader.ReaderError):
        at = len(text[: error.position].splitlines())
        return f"line {max(1, at)}: not YAML: {error.reason}"
    said = getattr(error, "problem", None) or str(error).partition("\n")[0]
    if said.startswith("but "):
        said = f"{getattr(error, 'context', '')}, {said}"
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f"not YAML: {said}"
    return f"line {min(mark.line, len(text.splitlines()) - 1) + 1}: not YAML: {said}"


def line(where: dict[str, int], path: str) -> str:
    """`line N: ` of the key at `path`, such as `.pool.device`; empty if not in the file."""
    return f"line {where[path]}: " if path in where else ""


def explained(error: str, kind: type, where: dict[str, int], values: object) -> str:
    """msgspec's `error`, with the mistake's line before it, the value and a hint behind it.

    kind: the struct that `values` should have become. where: the lines of keys."""
    place = re.search(r"at `\$([^`]*)", error)
    unknown = re.search(r"unknown field `(.+?)`", error, re.DOTALL)
    steps = re.findall(r"\w+", place[1]) if place else []
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
    elif "`float" in error and "got `str`" in error:
        hint = "; write digits, without quotes, 0.001 for 1e-3"
    elif named := [word for word in re.findall(r"\w+", error) if word in names]:
        # The error of a section's own check names one or two keys: take the line of the first key
        # that the file has.
        path += "." + next((name for name in named if f"{path}.{name}" in where), named[0])
    begin = line(where, path) or line(where, path.rpartition(".")[0])
    return f"{begin}{error}{_given(error, values, steps)}{hint}"


def _near(name: str, names: list[str], kind: type) -> str:
    """Guess the key behind the unknown key `name`. names: the keys of the section. kind: the whole
    configuration."""
    if close := get_close_matches(name, names, 1):
        return f"did you mean `{close[0]}`?"
    key = name.rpartition(".")[2]
    elsewhere = [path for path in _paths(kind) if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean `{'` or `'.join(elsewhere)}`?"
    return f"there are {', '.join(names)}"


def _paths(kind: Any, at: str = "") -> list[str]:
    return [
        path
        for name, field in _fields(kind).items()
        for path in (f"{at}{name}", *_paths(field, f"{at}{name}."))
    ]


def _given(error: str, value: Any, steps: list[str]) -> str:
    """`, which is VALUE` for the value at `steps`; empty if long, or if `error` shows it."""
    with suppress(LookupError, TypeError, ValueError):
        for step in steps:
            value = value[int(step)] if isinstance(value, list) else value[step]
        # msgspec does not name the wrong value of a mapping.
        simple = isinstance(value, str | int | float) or "[...]`" in error
        shown = repr(value) if steps and simple else ""
        if shown and shown not in error and len(shown) <= MAX_SHOWN_CHARS:
            return f", which is {shown}"
    return ""


def _fields(kind: Any) -> dict[str, Any]:
    if not isinstance(kind, type(msgspec.Struct)):
        return {}
    return {field.name: field.type for field in msgspec.structs.fields(kind)}
