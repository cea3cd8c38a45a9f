"""Sleep mode, from vLLM 0.33 on: vLLM frees the KV cache's memory and later maps new memory at the same addresses. The pool stays.

vLLM asks its connector for a reset before it sleeps, as before new weights. But the pool stays right as long as the weights are the same,
so the reset for a sleep that keeps them is put off. Every worker takes a digest of its weights before they go, and compares it when the
first request after waking is to be looked up. Unless all digests are equal, the namespace is reset then.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from time import monotonic
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from vcache_backend.vram_pool import checksum, cuda_segment

log = logging.getLogger("vllm.vcache")

CONFIRM_SECONDS = 10.0
"""How long the first request after waking waits for all workers to report whether their weights are as they were."""
_CORE, _CUMEM, _TAG = "vllm.v1.engine.core", "vllm.device_allocator.cumem", "weights"
_KEEPS = 1
"""The level of a sleep that keeps the weights."""


def refusal(model_config: Any, wanted: bool) -> str | None:
    """Why an instance with sleep mode must not cache, in one line with what to change; None if it may. wanted: `connector.sleep`."""
    if not hasattr(base.KVConnectorBase_V1, "unregister_kv_caches"):
        return (
            "vLLM before 0.33 frees the KV cache for its sleep while copies may still run: start vLLM without --enable-sleep-mode, "
            "or take vLLM 0.33"
        )
    backend = str(getattr(model_config, "sleep_mode_backend", "cumem"))
    if backend != "cumem":
        return f"what sleep mode's backend {backend} does to memory is not known: set --sleep-mode-backend cumem"
    return None if wanted else "with sleep mode nothing is cached unless that is asked for: set connector.sleep: true"


# ---- in the scheduler


def keeps_weights() -> bool:
    """Whether the reset that vLLM is asking for right now belongs to a sleep that keeps the weights.

    vLLM does not say so; the callers on the stack do. If they are not recognised, the answer is False: an ordinary reset.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CORE:
            name, found = frame.f_code.co_name, frame.f_locals
            if name == "sleep":
                return found.get("level") == _KEEPS
            if name == "release_kv_cache_memory":
                return True
            if name == "engine_idle_callback":
                return _level(found.get("future")) == _KEEPS
        frame = frame.f_back
    return False


def _level(paused: object) -> object:
    """The level of the sleep that waits for `paused`, the future of a pause; None if none waits."""
    for callback in getattr(paused, "_done_callbacks", ()):
        code: CodeType | None = getattr(callback, "__code__", None)
        if getattr(callback, "__qualname__", "").startswith("EngineCore.sleep.") and code is not None:
            cells = dict(zip(code.co_freevars, callback.__closure__ or (), strict=True))
            return cells["level"].cell_contents if "level" in cells else None
    return None


class Nap:
    """Whether a reset for a sleep is still put off. In the scheduler's thread.

    due: the number of the nap for which workers must report whether their weights are as they were; nothing is looked up until all have.
    0: none. A late report for an earlier nap does not count for this one: new weights may have come in between.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._naps = workers, 0
        self.due = 0
        self._said: dict[int, bool] = {}
        self._until = 0.0

    def begin(self) -> None:
        """vLLM is about to sleep. May be called again before it wakes up."""
        self._naps += 1
        self.due, self._said, self._until = self._naps, {}, 0.0

    @property
    def asked(self) -> bool:
        """Whether workers must report in the next step. Only once a request waits: vLLM also runs steps without a model for requests that
        came and left while it slept, when its weights may not be back yet."""
        return bool(self.due and self._until)

    def note(self, same: Mapping[int, tuple[int, bool]]) -> bool | None:
        """Take in workers' reports, by worker's number. True once all weights are as they were, False once some are not; else None."""
        if not self.due:
            return None
        self._said |= {worker: right for worker, (nap, right) in same.items() if nap == self.due}
        if all(self._said.values()) and len(self._said) < self._workers:
            return None
        self.due = 0
        return all(self._said.values())

    def gives_up(self) -> bool:
        """A request waits. Whether it has for `CONFIRM_SECONDS` now, so that the weights count as new."""
        self._until = self._until or monotonic() + CONFIRM_SECONDS
        if monotonic() < self._until:
            return False
        self.due = 0
        return True


# ---- in a worker


class Stretch(NamedTuple):
    """A range of GPU memory, in bytes."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class Weights:
    """A worker's weights, compared with those when it last fell asleep. In its main thread."""

    def __init__(self) -> None:
        self._worker: Callable[[], Any] = lambda: None
        self._before: tuple[bytes, bytes] | None = None
        self._kept = False
        self._same: tuple[int, bool] | None = None

    def note(self) -> None:
        """Note the weights: vLLM's worker, which is calling, is about to free memory.

        An earlier note stays until the scheduler has heard how it compares, since new weights may have come since.
        """
        if not self._kept:
            self._kept, self._before = True, self._look(_sleeper())

    def ask(self, nap: int, due: bool) -> tuple[int, bool] | None:
        """If `due`: (nap, whether the weights are as noted); False too if that cannot be told. Else None.

        nap: the scheduler's number; 0: nothing is open, so that the next sleep notes the weights anew.
        """
        if not nap:
            self._kept, self._same, self._before = False, None, None
        if not nap or not due:
            return None
        if self._same is None or self._same[0] != nap:
            self._same = nap, self._before is not None and self._look(self._worker()) == self._before
        return self._same

    def _look(self, worker: Any) -> tuple[bytes, bytes] | None:
        """Digests of where the weights lie and of their bytes. None if these cannot be read; the weights then count as new."""
        try:
            self._worker = weakref.ref(worker)
            tensors = list(_tensors(worker))
            places = repr([(name, tensor.data_ptr(), tensor.nbytes, tensor.stride()) for name, tensor in tensors])
            return blake2b(places.encode(), digest_size=16).digest(), checksum.digest(_memory(tensors))
        except Exception:  # the integration's outermost line: vLLM sleeps all the same
            log.exception(
                "vcache: cannot tell whether the weights change while vLLM sleeps: the pool's chunks are forgotten when it wakes"
            )
            return None


def _sleeper() -> Any:
    """vLLM's worker that is freeing memory, found on the stack. LookupError if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("sleep", "discard") and hasattr(worker := frame.f_locals.get("self"), "model_runner"):
            return worker
        frame = frame.f_back
    raise LookupError("no worker of vLLM's asks")


def _tensors(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors of the model and of a draft model: parameters and buffers."""
    draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
    for number, model in enumerate(model for model in (worker.model_runner.get_model(), draft) if model is not None):
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            yield f"{number} {name}", tensor


def _memory(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """All memory that sleep mode's allocator holds for weights, including what is no parameter, and that of `tensors` elsewhere.

    LookupError if some of it is freed now.
    """
    allocator = getattr(getattr(sys.modules.get(_CUMEM), "CuMemAllocator", None), "instance", None)
    made = allocator.pointer_to_data if allocator is not None else {}
    held = [Stretch(address, data.handle[1]) for address, data in sorted(made.items()) if data.tag == _TAG]
    if any(data.is_asleep for data in made.values() if data.tag == _TAG):
        raise LookupError("some of the weights are away")
    found = [cuda_segment.view(one, torch.cuda.current_device()) for one in held]
    seen = set[int]()
    for _, tensor in tensors:
        memory = tensor.untyped_storage()
        within = any(one.address <= memory.data_ptr() < one.address + one.nbytes for one in held)
        if memory.nbytes() and not within and memory.data_ptr() not in seen:
            seen.add(memory.data_ptr())
            found.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory))
    return found
