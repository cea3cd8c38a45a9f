"""The inside of test_injector_lmcache: in one vLLM with LMCache, any function of ours raises once.
Between two cases all objects of ours are made anew, as at the start of an instance."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

from injector_cases import Case, Outcome, Scope, Watch, end
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_cases import CHUNK, Prompt
from vllm_inside import POISON

from vcache_backend.children import until
from vcache_backend.integration import hooks as replaced
from vcache_backend.integration.lmcache import boundary, hooks, worker

WITHIN = "lmcache/", "hooks.py", "transfer/"
WITHIN += tuple(f"protocol/{name}.py" for name in ("client", "channel", "sockets"))
SCOPE = Scope(WITHIN, ("boundary.py",), ("VCacheBackend.__init__",))
"""What keeps exceptions on our side cannot raise itself. LMCache calls the backend's `__init__`,
logs what it raises, and goes on without a backend; it does all its work in a `try`."""
PROMPTS = [
    [3 + (7 * at + family * at * at) % 80 for at in range(3 * CHUNK + 9)] for family in (1, 2)
]
ROUNDS = ((0, 1), (1, 0), (0, 1))
"""The prompts of each batch. vLLM's prefix cache is emptied between two batches."""
FLUSH_SECONDS = 5.0


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Parts:
    """The objects of vLLM and LMCache, which stay, and ours, which are made anew."""

    def __init__(self, serving: Any) -> None:
        # On a busy machine a look-up that is not broken takes long, too.
        worker.MOST_SECONDS = 2.0
        self.serving, self.lines, self.cases = serving, Lines(), 0
        logging.getLogger("vllm.vcache").addHandler(self.lines)
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

    def anew(self, watch: Watch) -> None:
        end()
        with suppress(Exception):
            self.engine.storage_manager.storage_backends["vcache"].close()
        boundary.SCHEDULER.__init__("scheduler")
        boundary.WORKER.__init__("worker")
        boundary.SCHEDULER.off = boundary.WORKER.off = ""
        self.engine._init_failed = False
        self.lines.texts.clear()
        theirs = self.connector._lmcache_engine
        for owner in (self.connector, theirs, self.pool):
            ours = "build_connector_meta request_finished get_num_new_matched_tokens reset_cache "
            ours += "update_connector_output bind_gpu_block_pool weights_change weights_are "
            ours += "get_new_blocks cache_full_blocks cache_partial_block evict_blocks "
            for name in (ours + "reset_prefix_cache").split():
                vars(owner).pop(name, None)
        watch.begin()
        self.engine.storage_manager.recreate_backend("vcache")
        boundary.SCHEDULER.adopt(theirs.config)
        boundary.SCHEDULER.run(hooks._patch_scheduler, self.connector)
        self.connector.bind_gpu_block_pool(self.pool)
        look_up = self.engine.lookup

        def traced(*given: Any, **named: Any) -> Any:
            # In a thread of LMCache's.
            watch.follow()
            try:
                return look_up(*given, **named)
            finally:
                sys.setprofile(None)

        setattr(traced, replaced._THEIRS, getattr(look_up, replaced._THEIRS))
        self.engine.lookup = traced

    def rounds(self, salt: str, reset: bool = False, most: int = 3) -> tuple[list[Any], int]:
        """The answers of the first `most` rounds, and the tokens of the last that were cached."""
        answers = []
        for number, batch in enumerate(ROUNDS[:most]):
            prompts = [Prompt(PROMPTS[each], max_tokens=2, salt=salt) for each in batch]
            answers += self.serving.run(prompts, together=True)
            if reset and number == 1:
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


_parts: list[Parts] = []


def parts(serving: Any) -> Parts:
    if not _parts:
        _parts.append(Parts(serving))
    return _parts[0]


def count(serving: Any) -> dict[str, int]:
    """How often each function is called in a case."""
    made, watch = parts(serving), Watch(SCOPE)
    made.anew(watch)
    _, cached = made.rounds("counted", reset=True)
    end()
    # The pool was reset before the last round.
    assert cached == 0
    _, cached = made.rounds("hits")
    assert cached == 3 * CHUNK, cached
    return dict(watch.calls)


def run(serving: Any, case: Case) -> Outcome:
    """The function raises at the call; then whether anything is shared."""
    made, watch = parts(serving), Watch(SCOPE, case)
    made.cases += 1
    made.anew(watch)
    answers, _ = made.rounds(f"case {made.cases}", reset=True)
    end()
    if not (boundary.WORKER.off or boundary.SCHEDULER.off):
        # What raised in a thread of the client may have ended the connection, which comes back.
        until(lambda: made.worker.session.client.connected, FLUSH_SECONDS)
    after, cached = made.rounds(f"after {made.cases}", most=2)
    expected = [*made.expected, *made.expected[: len(after)]]
    pairs = zip([*answers, *after], expected, strict=True)
    wrong = sum(not one.agrees(right) for one, right in pairs)
    off = "" if cached else " ".join(made.lines.texts)
    return Outcome(watch.raised, f"{wrong} wrong answers" if wrong else "", off, cached)
