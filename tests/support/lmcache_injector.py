"""The inside of test_injector_lmcache: in one vLLM with LMCache, any function of ours raises at an
exact call, before or behind its work, also a nested one.

The interpreter's trace function raises. After that nothing is traced in this thread, so it raises
once. Between two cases all objects of ours are made anew, as at the start of an instance."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_cases import CHUNK, Prompt
from vllm_inside import POISON

import vcache_backend
from vcache_backend.integration import hooks as replaced
from vcache_backend.integration.lmcache import boundary, hooks, worker

ROOT = Path(vcache_backend.__file__).resolve().parent.parent
WITHIN = ("integration/lmcache/", "integration/hooks.py", "vcache_backend/transfer/")
WITHIN += tuple(f"vcache_backend/protocol/{name}.py" for name in ("client", "channel", "sockets"))
LAST_LINES = ("integration/lmcache/boundary.py",)
"""What keeps exceptions on our side cannot raise itself."""
OUTERMOST = ("VCacheBackend.__init__",)
"""LMCache calls it, logs what it raises, and goes on without a backend; it does all its work in a
`try`."""
PROMPTS = [
    [3 + (7 * at + family * at * at) % 80 for at in range(3 * CHUNK + 9)] for family in (1, 2)
]
ROUNDS = ((0, 1), (0,), (1, 0), (0, 1))
"""The prompts of each batch. vLLM's prefix cache is emptied between two batches."""
FLUSH_SECONDS = 5.0


class Injected(RuntimeError):
    """Raised on purpose."""


class Case(NamedTuple):
    """A function by file and qualified name, the number of its call, and where it raises."""

    name: str
    call: int
    behind: bool


class Outcome(NamedTuple):
    """raised: whether the call came. wrong: answers that are not right. off: why nothing is shared;
    empty: a hit came afterwards."""

    raised: bool
    wrong: int
    off: str


class Tracer:
    """Counts the calls of our functions, or raises at one of them."""

    def __init__(self, case: Case | None) -> None:
        self.case, self.raised, self.left = case, False, case.call if case else 0
        self.calls: Counter[str] = Counter()
        self._names: dict[CodeType, str] = {}
        self._lock = threading.Lock()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = self._names.get(frame.f_code)
        if name is None:
            name = self._names[frame.f_code] = name_of(frame.f_code)
        if not name or self.raised:
            return None
        if self.case is None:
            self.calls[name] += 1
            return None
        if name != self.case.name:
            return None
        with self._lock:
            self.left -= 1
            if self.left:
                return None
            self.raised = True
        if not self.case.behind:
            raise Injected(f"in {name}")
        frame.f_trace_lines = False
        return self._behind

    def _behind(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "return":
            raise Injected(f"behind {self.case.name}")
        return self._behind


def name_of(code: CodeType) -> str:
    """`file:qualified name` of a function in question; otherwise empty."""
    if not code.co_filename.startswith(str(ROOT)):
        return ""
    file = code.co_filename.removeprefix(f"{ROOT}/").replace(
        "vcache_backend/integration", "integration"
    )
    within = file.startswith(WITHIN) and not file.startswith(LAST_LINES)
    module = code.co_name in ("<module>", "<listcomp>", "<dictcomp>", "<genexpr>", "<setcomp>")
    raises = within and not module and code.co_qualname not in OUTERMOST
    return f"{file}:{code.co_qualname}" if raises else ""


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Parts:
    """The objects of vLLM and LMCache, which stay, and ours, which are made anew."""

    def __init__(self, serving: Any) -> None:
        worker.MOST_SECONDS = 0.5
        self.serving, self.lines, self.cases = serving, Lines(), 0
        logging.getLogger("vcache_backend").addHandler(self.lines)
        scheduler = serving.llm.llm_engine.engine_core.engine_core.scheduler
        self.connector, self.pool = scheduler.connector, scheduler.kv_cache_manager.block_pool
        self.adapter = get_kv_transfer_group()._lmcache_engine
        self.engine = self.adapter.lmcache_engine
        kv = self.worker._kv
        self.pages = [page for kind in kv.kinds for page in kind.pages]
        self.expected = self.rounds("expected")[0]

    @property
    def worker(self) -> Any:
        return self.engine.storage_manager.storage_backends["vcache"].worker

    def anew(self, tracer: Tracer | None) -> None:
        sys.settrace(None)
        threading.settrace(None)
        with suppress(Exception):
            self.engine.storage_manager.storage_backends["vcache"].close()
        boundary.SCHEDULER.__init__("scheduler")
        boundary.WORKER.__init__("worker")
        self.engine._init_failed = False
        self.lines.texts.clear()
        theirs = self.connector._lmcache_engine
        for owner in (self.connector, theirs, self.pool):
            ours = "build_connector_meta request_finished get_num_new_matched_tokens reset_cache "
            ours += "update_connector_output bind_gpu_block_pool weights_change weights_are "
            ours += "get_new_blocks cache_full_blocks cache_partial_block evict_blocks "
            for name in (ours + "reset_prefix_cache").split():
                vars(owner).pop(name, None)
        threading.settrace(tracer)
        sys.settrace(tracer)
        self.engine.storage_manager.recreate_backend("vcache")
        boundary.SCHEDULER.config = theirs.config
        boundary.SCHEDULER.run(hooks._patch_scheduler, self.connector)
        self.connector.bind_gpu_block_pool(self.pool)
        look_up = self.engine.lookup

        def traced(*given: Any, **named: Any) -> Any:
            # In a thread of LMCache's.
            sys.settrace(tracer)
            try:
                return look_up(*given, **named)
            finally:
                sys.settrace(None)

        setattr(traced, replaced._THEIRS, getattr(look_up, replaced._THEIRS))
        self.engine.lookup = traced

    def rounds(self, salt: str, reset: bool = False, most: int = 4) -> tuple[list[Any], int]:
        """The answers of the first `most` rounds, and the tokens of the last that were cached."""
        answers = []
        for number, batch in enumerate(ROUNDS[:most]):
            prompts = [Prompt(PROMPTS[each], max_tokens=2, salt=salt) for each in batch]
            answers += self.serving.run(prompts, together=True)
            if reset and number == 2:
                self.serving.reset()
            else:
                self.serving.forget()
            self.flush()
            for page in self.pages:
                page[1:] = POISON
        return answers, answers[-1].cached

    def flush(self) -> None:
        with suppress(Exception):
            self.worker.session.flush(FLUSH_SECONDS)

    def close(self) -> None:
        sys.settrace(None)
        threading.settrace(None)


_parts: list[Parts] = []


def parts(serving: Any) -> Parts:
    if not _parts:
        _parts.append(Parts(serving))
    return _parts[0]


def count(serving: Any) -> dict[str, int]:
    """How often each function is called in a case."""
    made, tracer = parts(serving), Tracer(None)
    made.anew(tracer)
    _, cached = made.rounds("counted", reset=True)
    made.close()
    # The pool was reset before the last round.
    assert cached == 0
    _, cached = made.rounds("hits")
    assert cached == 3 * CHUNK, cached
    return dict(tracer.calls)


def run(serving: Any, given: tuple[str, int, bool]) -> Any:
    """The function raises at the call; then whether anything is shared."""
    made = parts(serving)
    made.cases += 1
    case = Case(*given)
    tracer = Tracer(case)
    made.anew(tracer)
    answers, _ = made.rounds(f"case {made.cases}", reset=True)
    made.close()
    after, cached = made.rounds(f"after {made.cases}", most=2)
    expected = [*made.expected, *made.expected[: len(after)]]
    pairs = zip([*answers, *after], expected, strict=True)
    wrong = sum(not one.agrees(right) for one, right in pairs)
    off = ""
    if not cached:
        off = " ".join(made.lines.texts) or "nobody says why"
    return tuple(Outcome(tracer.raised, wrong, off))
