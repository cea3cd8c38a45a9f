"""The copier of a GPU: runs copies on streams of its own, in the order that `Copier` promises."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

import numpy as np
import torch

from vcache_backend.errors import LayoutError, VCacheError, raising_as
from vcache_backend.vram_pool import cuda_driver
from vcache_backend.vram_pool.copies import kernel
from vcache_backend.vram_pool.copies.copier import Completion, Finished, Mark, check, check_rows
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV
from vcache_backend.vram_pool.copies.plan import CopyPlan, of_kinds
from vcache_backend.vram_pool.regions import SlotView

CLOSE_SECONDS = 5.0
"""How long `CudaCopier.drain` waits for the copies of each stream."""
_TABLE_ROWS = 1024
"""The fewest rows of a new table: 4,096 tokens in blocks of 16, of 64 layers, need 384 rows."""
_SPIN_SECONDS = 0.005
_SLEEP_SECONDS = 0.0001


class CudaMark(NamedTuple):
    """The work that was queued on a stream when `event` was recorded on this stream."""

    event: torch.cuda.Event

    def reached(self) -> bool:
        with raising_as(VCacheError, "the work before a mark", RuntimeError):
            return bool(self.event.query())


class CudaCompletion:
    """A copy on a stream of `device`; the copy is over once the stream reaches `end`. Any thread.

    held: objects that the copy uses, kept until the end. give_back: called once at the end."""

    def __init__(
        self,
        device: torch.device,
        start: torch.cuda.Event,
        end: torch.cuda.Event,
        held: object,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._device, self._start, self.end = device, start, end
        self._held = [(held, give_back)]

    def done(self) -> bool:
        if not self._held:
            return True
        with raising_as(VCacheError, f"copy on {self._device}", RuntimeError):
            if not self.end.query():
                return False
        with suppress(IndexError):  # another thread was first
            self._held.pop()[1]()
        return True

    def wait(self, timeout_s: float) -> bool:
        with raising_as(VCacheError, f"copy on {self._device}", RuntimeError):
            reached = _poll(self.end.query, timeout_s)
        return reached and self.done()

    @property
    def seconds(self) -> float | None:
        return float(self._start.elapsed_time(self.end)) / 1000 if self.done() else None


class _Slots:
    """A copy between a KV cache and slots. Keeps both alive. Raises LayoutError."""

    origins = 1

    def __init__(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
        check(kv, plan, slots)
        self.kv, self.blocks, self._plan, self._slots = kv, len(plan.blocks), plan, tuple(slots)
        self.local = all(slot.local for slot in slots)
        self.host = any(slot.whole.device.type == "cpu" for slot in slots)

    def fill(self, table: Int64s, parts: Sequence[kernel.TablePart]) -> list[int]:
        """Write the kernel's table for each kind of layers. Returns the alignments of the slots."""
        found = []
        addresses = np.array([slot.address for slot in self._slots], dtype=np.int64)
        for number, (kind, first, end) in enumerate(parts):
            plan, begin = self._plan.of(self.kv, number)
            found.append(kernel.fill_slots(kind, plan, addresses + begin, table[first:end]))
        return found


class _Rows:
    """A copy into a KV cache from any addresses: see `Copier.pull`. Keeps `keep` alive. Raises
    LayoutError."""

    def __init__(
        self,
        kv: PagedKV,
        rows: Int64s,
        origins: Int64s,
        keep: object,
        local: bool,
        host: bool,
    ) -> None:
        check_rows(kv, rows, origins)
        self.kv, self.blocks, self.origins = kv, len(rows), len(origins)
        self.local, self.host = local, host
        self._rows, self._bases, self._keep = rows, origins, keep

    def fill(self, table: Int64s, parts: Sequence[kernel.TablePart]) -> list[int]:
        """Write the kernel's table for each kind of layers. Returns the alignments of the pages to
        read."""
        return [
            kernel.fill_table(kind, rows, bases, table[first:end])
            for (kind, rows, bases), (_, first, end) in zip(
                of_kinds(self.kv, self._rows, self._bases), parts, strict=True
            )
        ]


class CudaCopier:
    """Copies with the Triton kernel on two streams of GPU `ordinal`: a stream for gathers, and a
    stream for scatters and pulls.

    Each copy starts after the work of the caller's current stream, and the current stream then
    waits for the copy, unless the caller gave a mark. Both streams wait on the device; the host
    never waits. max_ctas: the most thread blocks of a copy from or to memory outside this GPU; 0:
    the tuned number."""

    def __init__(self, ordinal: int, max_ctas: int = 0) -> None:
        self.device, self.max_ctas = torch.device("cuda", ordinal), max_ctas
        with torch.cuda.device(self.device):
            self._gathers, self._scatters = torch.cuda.Stream(), torch.cuda.Stream()
        self._tables: list[kernel.Table] = []
        self._driver = cuda_driver.load()
        self._under_way: list[CudaCompletion] = []
        self._lock = threading.Lock()
        """Guards `_under_way`: a thread may add a copy while another thread removes copies."""

    def prepare(self, kv: PagedKV) -> None:
        """Compile the few kernels for `kv`, each in up to a second."""
        with torch.cuda.device(self.device):
            for kind in kv.kinds:
                table = torch.empty((len(kind.planes), 3), dtype=torch.int64, device=self.device)
                for tuning in (kernel.PEER, kernel.LOCAL, kernel.HOST):
                    for to_origin, many in ((True, False), (False, False), (False, True)):
                        kernel.launch(kind, 0, table, to_origin=to_origin, many=many, tuning=tuning)

    def gather(
        self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None
    ) -> Completion:
        return self._run(self._gathers, _Slots(kv, plan, slots), after, to_origin=True)

    def scatter(
        self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None
    ) -> Completion:
        return self._run(self._scatters, _Slots(kv, plan, slots), after)

    def pull(
        self,
        kv: PagedKV,
        rows: Int64s,
        origins: Int64s,
        after: Mark | None = None,
        keep: object = None,
        *,
        local: bool = False,
        host: bool = False,
    ) -> Completion:
        return self._run(self._scatters, _Rows(kv, rows, origins, keep, local, host), after)

    def mark(self) -> CudaMark:
        return CudaMark(torch.cuda.current_stream(self.device).record_event())

    def fence(self, copy: Completion) -> None:
        if isinstance(copy, CudaCompletion):
            torch.cuda.current_stream(self.device).wait_event(copy.end)
        elif not isinstance(copy, Finished):
            raise TypeError(f"a {type(copy).__name__} is not a copy of this copier: nothing waits")

    def drain(self) -> None:
        for stream in (self._gathers, self._scatters):
            _poll(stream.query, CLOSE_SECONDS)

    def _run(
        self,
        side: torch.cuda.Stream,
        job: _Slots | _Rows,
        after: Mark | None,
        *,
        to_origin: bool = False,
    ) -> Completion:
        kv = job.kv
        if kv.device != self.device:
            raise LayoutError(
                f"the KV cache is on {kv.device}, but this copier is of {self.device}"
            )
        if not job.blocks:
            return Finished(0.0)
        parts = kernel.table_parts(kv, job.blocks, job.origins)
        size = parts[-1].end
        # Launches go to the thread's current device. Work is queued by stream handle: torch's
        # stream contexts and copies would cost the host as much as the rest of a retrieve.
        with (
            torch.cuda.device(self.device)
            if torch.cuda.current_device() != self.device.index
            else nullcontext()
        ):
            table = self._table(size, side)
            alignments = job.fill(table.array[:size], parts)
            try:
                # Before the wait, so that the table travels while earlier work still computes.
                table.upload(size, self._driver, side.cuda_stream)
                pairs = zip(parts, alignments, strict=True)
                start, end = self._launch(side, job, table, pairs, after, to_origin)
            except BaseException:
                # The current stream may not be waiting for the kernel, and the caller has no
                # completion: no kernel may be left running.
                side.synchronize()
                raise
        completion = CudaCompletion(
            self.device, start, end, job, lambda: self._tables.append(table)
        )
        # A kernel's memory must live until the kernel ends, even if the caller drops the
        # completion.
        with self._lock:
            self._under_way.append(completion)
            # A VCacheError from here would mean that no part of this copy runs. If the device
            # failed, the completion says so.
            with suppress(VCacheError):
                self._under_way = [earlier for earlier in self._under_way if not earlier.done()]
        return completion

    def _launch(
        self,
        side: torch.cuda.Stream,
        job: _Slots | _Rows,
        table: kernel.Table,
        parts: Iterable[tuple[kernel.TablePart, int]],
        after: Mark | None,
        to_origin: bool,
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Queue a kernel on `side` for each part and alignment. Returns the events before and after
        the kernel."""
        current, start = torch.cuda.current_stream(), torch.cuda.Event(enable_timing=True)
        if isinstance(after, CudaMark):
            side.wait_event(after.event)
        elif after is None:
            self._driver.follow(side.cuda_stream, table.ready, current.cuda_stream)
        start.record(side)
        tuning = kernel.tuning_for(
            local=job.local, host=job.host, max_ctas=0 if job.local else self.max_ctas
        )
        for part, aligned in parts:
            kernel.launch(
                part.kv,
                job.blocks,
                table.there[part.first :],
                to_origin=to_origin,
                many=job.origins > 1,
                tuning=tuning,
                aligned=aligned,
                stream=side.cuda_stream,
            )
        end = torch.cuda.Event(enable_timing=True)
        end.record(side)
        if after is None:
            current.wait_event(end)
        return start, end

    def _table(self, rows: int, side: torch.cuda.Stream) -> kernel.Table:
        """A table of at least `rows` rows that no copy uses; an earlier copy's if possible."""
        while self._tables:
            with suppress(IndexError):  # another thread took it
                table = self._tables.pop()
                if table.rows >= rows:
                    return table
        # The table's memory comes from the side stream's pool: work queued on the caller's stream
        # may still use memory of that stream, and the table is written without waiting for such
        # work.
        with torch.cuda.stream(side):
            return kernel.Table(
                max(_TABLE_ROWS, 1 << (rows - 1).bit_length()), self.device, self._driver
            )


def _poll(done: Callable[[], bool], timeout_s: float) -> bool:
    began = time.monotonic()
    while not done():
        waited = time.monotonic() - began
        if waited >= timeout_s:
            return False
        # Spin first: most copies take a millisecond or two, and even the shortest sleep takes some
        # 50 microseconds.
        if waited < _SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(_SLEEP_SECONDS, timeout_s - waited))
    return True
