"""What keeps our failures from whom we serve."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def answers(default: object) -> Callable[[Method], Method]:
    """A method that fails answers this, or what this makes: vLLM and LMCache die of an exception in most calls. Its object is told by
    `note_failure(name, error)`, which says it once."""

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
