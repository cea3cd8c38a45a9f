"""Replaces functions of vLLM and LMCache, after a check that they are the expected ones. Imports
neither."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from vcache_backend.errors import VCacheError

log = logging.getLogger("vllm.vcache")

_THEIRS = "_theirs_before_vcache"


class Changed(VCacheError):
    """vLLM or LMCache lacks a function, parameter or attribute that vcache needs. The message names
    it."""


def replace(
    owner: Any, name: str, make: Callable[[Any], Callable[..., Any]], wanted: str = ""
) -> None:
    """Replace `owner.name` by `make(theirs)`. `theirs` is the original, also on repetition.

    wanted: names of parameters that the original must have, separated by blanks. Changed if the
    original or a parameter is missing."""
    theirs: Any = getattr(owner, name, None)
    theirs = getattr(theirs, _THEIRS, theirs)
    parameters = inspect.signature(theirs).parameters if callable(theirs) else {}
    lacking = [parameter for parameter in wanted.split() if parameter not in parameters]
    if not callable(theirs) or lacking:
        _changed(owner, f"{name} with {' and '.join(lacking)}" if lacking else name)
    ours = functools.wraps(theirs)(make(theirs))
    setattr(ours, _THEIRS, theirs)
    setattr(owner, name, ours)


def observe(
    owner: Any,
    name: str,
    wanted: str,
    before: Callable[..., object] | None = None,
    after: Callable[..., object] | None = None,
) -> None:
    """Call `before` and `after` around `owner.name`, with its arguments. What they raise is logged.
    wanted: as in `replace`."""

    def make(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            tell(before, given, named)
            answer = theirs(*given, **named)
            tell(after, given, named)
            return answer

        return call

    def tell(ours: Callable[..., object] | None, given: Any, named: Any) -> None:
        try:
            if ours is not None:
                ours(*given, **named)
        except Exception:
            log.exception("vcache: an error of its own where vLLM calls %s", name)

    replace(owner, name, make, wanted)


def require(owner: Any, names: str) -> None:
    """Check that `owner` has these attributes, separated by blanks. Changed if not."""
    lacking = [name for name in names.split() if not hasattr(owner, name)]
    if lacking:
        _changed(owner, ", ".join(lacking))


def _changed(owner: Any, what: str) -> None:
    kind = owner if isinstance(owner, type | ModuleType) else type(owner)
    package = getattr(kind, "__module__", kind.__name__).partition(".")[0]
    raise Changed(f"{package} has changed where vcache hooks in: {kind.__name__} has no {what}")


def after_import(name: str, act: Callable[[Any], object]) -> None:
    """Call `act` with the module `name`: now if it is imported, otherwise once after each later
    execution. act: must not raise. Idempotent for equal arguments."""
    finder = _Finder(name, act)
    if name in sys.modules:
        act(sys.modules[name])
    elif finder not in sys.meta_path:
        sys.meta_path.insert(0, finder)


class _Finder(MetaPathFinder):
    """Finds one module as always, and calls `act` after its execution."""

    def __init__(self, name: str, act: Callable[[Any], object]) -> None:
        self._name, self._act = name, act

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Finder) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # None: the next finder finds it.
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._act(module)

            # This loader serves this module only.
            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec
