"""Reads YAML, and explains mistakes in configuration files: the lines, and likely corrections."""

from __future__ import annotations

import re
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec
import yaml

from vcache_backend.errors import MAX_SHOWN_CHARS, ConfigError

_DEEPEST = 8
"""The deepest nesting of a YAML text: PyYAML recurses."""


class _Loader(yaml.SafeLoader):
    """Notes the line of each key by its path, such as `.pool.device`. ConfigError: aliases, which
    can stand for a thousand times as much text, deep nesting, and keys that occur twice or are no
    text."""

    def __init__(self, text: bytes, source: str) -> None:
        self.lines: dict[str, int] = {}
        self._source, self._path = source, list[str]()
        super().__init__(text)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            said = f"*{str(event.anchor)[:MAX_SHOWN_CHARS]} is an alias"
            self._refuse(mark, f"{said}: write the value itself, or put it in quotes if it is text")
        if len(self._path) > _DEEPEST:
            self._refuse(mark, "the sections are nested too deeply")
        is_key = isinstance(index, yaml.ScalarNode)
        self._path.append(index.value if is_key else "")
        path = ".".join(self._path)
        if is_key and not index.tag.endswith(":str"):
            said = "a key is a name, and this is none to YAML"
            self._refuse(index.start_mark, f"{said}: {index.value!r}")
        if is_key and path in self.lines:
            said = f"is there again, after line {self.lines[path]}; remove one"
            self._refuse(index.start_mark, f"`{path[1:]}` {said}")
        if is_key:
            self.lines[path] = index.start_mark.line + 1
        node = super().compose_node(parent, index)
        self._path.pop()
        return node

    def _refuse(self, mark: yaml.Mark, said: str) -> NoReturn:
        raise ConfigError(f"{self._source}: line {mark.line + 1}: {said}")


def parse(text: bytes, source: str) -> tuple[Any, dict[str, int]]:
    """Read a YAML text. Returns the value, and the line of each key by path. ConfigError, with the
    mistake's line if known."""
    try:
        loader = _Loader(text, source)
        return loader.get_single_data(), loader.lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        known = filter(None, (getattr(error, "context", ""), getattr(error, "problem", "")))
        said = ", ".join(known) or str(error).partition("\n")[0]
        at = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{source}: {at}not YAML: {said}") from error
    # by PyYAML: a number or a date that is none
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{source}: not YAML: {error}; put it in quotes if it is text") from error


def explained(error: str, kind: type, where: dict[str, int], values: object) -> str:
    """msgspec's `error`, with the mistake's line before it, the value and a hint behind it.

    kind: the struct that `values` should have become. where: the lines of keys."""
    place = re.search(r"at `\$([^`]*)", error)
    steps = re.findall(r"\w+", place[1]) if place else []
    path, hint = "".join(f".{step}" for step in steps), ""
    expected: Any = kind
    for name in steps:
        expected = _fields(expected).get(name)
    names = list(_fields(expected))
    if unknown := re.search(r"unknown field `(.+?)`", error, re.DOTALL):
        close = get_close_matches(unknown[1], names, 1)
        hint = f"; did you mean `{close[0]}`?" if close else f"; there are {', '.join(names)}"
        path += f".{unknown[1]}"
    elif get_origin(expected) is Literal:
        hint = f"; expected {' or '.join(map(str, get_args(expected)))}"
    elif named := [word for word in re.findall(r"\w+", error) if f"{path}.{word}" in where]:
        # The error of a section's own check names one or two keys.
        path += f".{named[0]}"
    line = where.get(path) or where.get(path.rpartition(".")[0])
    return f"{f'line {line}: ' if line else ''}{error}{_given(error, values, steps)}{hint}"


def _given(error: str, value: Any, steps: list[str]) -> str:
    """`, which is VALUE` for the value at `steps`; empty if long, or if `error` shows it."""
    with suppress(LookupError, TypeError):
        for step in steps:
            value = value[step]
        shown = repr(value)
        simple = not isinstance(value, dict) or "[...]" in error
        if steps and simple and shown not in error:
            return f", which is {shown}" if len(shown) <= MAX_SHOWN_CHARS else ""
    return ""


def _fields(kind: Any) -> dict[str, Any]:
    if not isinstance(kind, type(msgspec.Struct)):
        return {}
    return {field.name: field.type for field in msgspec.structs.fields(kind)}
