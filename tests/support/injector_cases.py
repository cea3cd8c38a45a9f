"""An exception of ours that a test asks for, what raises it, and what came of it; see injector.py and
lmcache_injector.py."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import vcache_backend

_PACKAGE = Path(vcache_backend.__path__[0]).resolve()
ROOTS = tuple(f"{folder}/" for folder in (_PACKAGE, _PACKAGE.parent / "integration"))
_MODULES = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


class Case(NamedTuple):
    """One exception. after: at the function's return. call: at its first, second, … call."""

    function: str
    after: bool
    call: int

    def __str__(self) -> str:
        return f"{self.function} {'after' if self.after else 'before'} its work, call {self.call}"


class Outcome(NamedTuple):
    """reached: the function was called as often. wrong: what must not be: an answer that differs, a
    request that hangs, an exception in vLLM. off: why the scheduler's half is out of use. hit:
    tokens that a last request has loaded."""

    reached: bool
    wrong: str
    off: str
    hit: int

    @property
    def kind(self) -> str:
        if not self.reached:
            return "not reached"
        if self.wrong or not (self.off or self.hit):
            return "wrong"
        return "off, and said" if self.off else "shares again"


@cache
def file_of(path: str) -> str:
    """Of ours; empty for all others."""
    real = str(Path(path).resolve()) if path[:1] not in ("", "<") else ""
    return next((real.removeprefix(root) for root in ROOTS if real.startswith(root)), "")


class Scope(NamedTuple):
    """Functions that may raise: of files that begin with `within`, but for these files and, by the
    beginning of their qualified names, the outermost ones."""

    within: tuple[str, ...]
    files: tuple[str, ...]
    outermost: tuple[str, ...]

    def name(self, code: CodeType) -> str:
        """`file:qualified name`; empty for all others."""
        file = file_of(code.co_filename)
        inside = bool(file) and file.startswith(self.within) and not file.endswith(self.files)
        raises = inside and not code.co_qualname.startswith(self.outermost)
        return f"{file}:{code.co_qualname}" if raises and code.co_name not in _MODULES else ""


class Watch:
    """Counts the calls of functions in a scope, or raises at one of them, once: before its work, or
    after it.

    To count, it is a profile function. This makes vLLM three times as slow; so to raise it takes the
    function's place, where that can be done."""

    def __init__(self, scope: Scope, case: Case | None = None) -> None:
        self.case, self.raised, self.calls = case, False, Counter[str]()
        self._event = "return" if case is not None and case.after else "call"
        self._scope, self._names = scope, dict[CodeType, str]()
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != self._event:
            return
        name, case = self._names.get(frame.f_code), self.case
        if name is None:
            name = self._names[frame.f_code] = self._scope.name(frame.f_code)
        if name and (case is None or name == case.function):
            self.happen(name)

    def happen(self, name: str) -> None:
        """The function is called, or returns."""
        with self._lock:
            self.calls[name] += 1
            if self.case is None or self.raised or self.calls[name] < self.case.call:
                return
            self.raised = True
        raise RuntimeError(f"on purpose, {self.case}")

    def begin(self) -> None:
        """In this thread, and in those that begin from now on."""
        self._plain = plain_functions(self.case.function) if self.case is not None else []
        for function in self._plain:
            _take_place(function, self)
        if not self._plain:
            threading.setprofile(self)
            self.follow()

    def follow(self) -> None:
        """In this thread, which began before."""
        if not self._plain:
            sys.setprofile(self)


@cache
def _ours() -> Mapping[str, list[Any]]:
    """Those of ours that are imported when this is called first, by their files."""
    found = defaultdict[str, list[Any]](list)
    for module in list(sys.modules.values()):
        found[file_of(getattr(module, "__file__", None) or "")].append(module)
    return found


def plain_functions(name: str) -> list[FunctionType]:
    """Functions of that name, in each module that was made of the file; none if it is one that is
    made anew for each call of another, or that needs its own code: with variables of another, or
    with `yield`."""
    file, _, path = name.partition(":")
    found = list[FunctionType]()
    for module in _ours()[file]:
        one: Any = module
        for part in path.split("."):
            one = getattr(one, "__dict__", {}).get(part)
        one = inspect.unwrap(getattr(one, "fget", None) or getattr(one, "__func__", one))
        if isinstance(one, FunctionType) and one.__code__.co_qualname == path:
            found.append(one)
    codes = [one.__code__ for one in found]
    yields = inspect.CO_GENERATOR | inspect.CO_COROUTINE
    return [] if any(code.co_freevars or code.co_flags & yields for code in codes) else found


_TAKEN = "_taken_for_a_test"
_CALL = compile(f"lambda *given, **named: {_TAKEN}(*given, **named)", __file__, "eval").co_consts[0]
_taken = list[tuple[FunctionType, CodeType]]()


def _take_place(function: FunctionType, watch: Watch) -> None:
    """Whoever calls it calls the watch, too, until `end`."""
    original = FunctionType(function.__code__, function.__globals__, function.__name__)
    original.__defaults__, original.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    case = watch.case
    assert case is not None

    def called(*given: Any, **named: Any) -> Any:
        if not case.after:
            watch.happen(case.function)
        answer = original(*given, **named)
        if case.after:
            watch.happen(case.function)
        return answer

    _taken.append((function, function.__code__))
    function.__globals__[_TAKEN], function.__code__ = called, _CALL


def end() -> None:
    """Nothing is watched in this thread any more, and no function is another's."""
    sys.setprofile(None)
    threading.setprofile(None)
    while _taken:
        function, code = _taken.pop()
        function.__code__ = code


# ---- in the test


ALL = os.environ.get("VCACHE_INJECT") == "all"
"""Whether each function raises in every way, not in one."""


def ways(calls: Mapping[str, int], every_way: bool = ALL) -> Iterator[list[Case]]:
    """By function, of which calls says how often it is called: how it raises."""
    for number, (name, count) in enumerate(sorted(calls.items())):
        every = [Case(name, after, call) for call in (1, min(3, count)) for after in (False, True)]
        yield list(dict.fromkeys(every)) if every_way else [every[number % len(every)]]


def outcomes_of(
    title: str,
    cases: Iterator[Case],
    outcome_of: Callable[[Case], str],
    files: set[str],
    record_property: Callable[[str, object], None],
    calls: Callable[[], Mapping[str, int]] = dict,
) -> None:
    """Fails if an outcome is wrong, which then begins with `wrong`, if functions of one of these
    files are missing, or if many are not reached that are still called as often: calls says how
    often, since a machine that was busy when the cases were made calls some that it calls no more
    when it is not. The counts are a line of pytest's summary; the file that
    `VCACHE_INJECT_TABLE` names, with the title behind, gets a table."""
    outcomes = dict[Case, str]()
    try:
        for case in cases:
            for _ in range(2):  # a few functions are called in some orders of threads only
                outcomes[case] = outcome_of(case)
                if outcomes[case] != "not reached":
                    break
    finally:
        kinds = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
        said = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        functions = len({case.function for case in outcomes})
        line = f"injector, {title}: {len(outcomes)} cases of {functions} functions: {said}"
        record_property("summary", line)
        if file := os.environ.get("VCACHE_INJECT_TABLE"):
            rows = [f"| {case} | {outcome} |" for case, outcome in outcomes.items()]
            Path(f"{file}.{title}").write_text("\n".join([line, "", *rows, ""]))
    wrong = [f"{case}: {one}" for case, one in outcomes.items() if one.startswith("wrong")]
    assert not wrong, "\n".join([f"{len(wrong)} cases", *wrong[:20]])
    assert {case.function.partition(":")[0] for case in outcomes} >= files
    missed, most = kinds["not reached"], max(2, len(outcomes) // 20)
    if missed > most and (now := calls()):
        lost = [case for case, outcome in outcomes.items() if outcome == "not reached"]
        missed = sum(now.get(case.function, 0) >= case.call for case in lost)
    assert missed <= most
