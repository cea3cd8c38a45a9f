"""Keeps our exceptions out of vLLM and LMCache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def answers(default: object) -> Callable[[Method], Method]:
    """Decorator: if the method raises, return `default` (or the result of `default()`, if
    callable).

    vLLM and LMCache end on an exception in most calls. The method's object gets a call of
    `note_failure(name, error)`, which logs the error once."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the outermost line of ours
                self.note_failure(method.__name__, error)
                return default() if callable(default) else default

        return cast(Method, guarded)

    return decorate
