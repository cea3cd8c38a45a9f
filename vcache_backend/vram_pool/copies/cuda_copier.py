"""The copier of a GPU: runs copies on streams of its own, in the order that `Copier` promises."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch

from vcache_backend.errors import LayoutError, VCacheError, raising_as
from vcache_backend.vram_pool import cuda_driver
from vcache_backend.vram_pool.copies import kernel
from vcache_backend.vram_pool.copies.copier import Completion, Copier, CopyJob, Finished, Mark
from vcache_backend.vram_pool.copies.geometry import PagedKV


class CudaMark(NamedTuple):
    """The work that was queued on a stream when `event` was recorded on this stream."""

    event: torch.cuda.Event

    def reached(self) -> bool:
        with raising_as(VCacheError, "the work before a mark", RuntimeError):
            return bool(self.event.query())

    def wait(self, timeout_s: float) -> bool:
        # CUDA's wait has no deadline. If the device hangs, vLLM waits for it, too.
        with raising_as(VCacheError, "the work before a mark", RuntimeError):
            self.event.synchronize()
        return True


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


class CudaCopier(Copier):
    """Copies with the Triton kernel on two streams of GPU `ordinal`: a stream for gathers, and a
    stream for pulls.

    Each copy starts after the work of the caller's current stream, and the current stream then
    waits for the copy, unless the caller gave a mark. Both streams wait on the device; the host
    never waits. max_ctas: the most thread blocks of a copy from or to memory outside this GPU; 0:
    the tuned number."""

    def __init__(self, ordinal: int, max_ctas: int = 0) -> None:
        self.device, self.max_ctas = torch.device("cuda", ordinal), max_ctas
        with torch.cuda.device(self.device):
            self._out, self._into = torch.cuda.Stream(), torch.cuda.Stream()
        self._tables: list[kernel.Table] = []
        self._driver = cuda_driver.load()
        self._under_way: list[CudaCompletion] = []
        self._lock = threading.Lock()
        """Guards `_under_way`: a thread may add a copy while another thread removes copies."""

    def prepare(self, kv: PagedKV) -> None:
        """Compile the few kernels for `kv`, each in up to a second."""
        with torch.cuda.device(self.device):
            for kind in kv.kinds:
                table = torch.empty((len(kind.pages), 3), dtype=torch.int64, device=self.device)
                for to_origin, many in ((True, False), (False, False), (False, True)):
                    part = kernel.TablePart(kind, 0, 0, many, 16)
                    stream = (self._out if to_origin else self._into).cuda_stream
                    kernel.launch(part, table, to_origin=to_origin, ctas=1, stream=stream)

    def mark(self) -> CudaMark:
        # Who waits for it sleeps.
        event = torch.cuda.Event(blocking=True)
        return CudaMark(torch.cuda.current_stream(self.device).record_event(event))

    def fence(self, copy: Completion) -> None:
        if isinstance(copy, CudaCompletion):
            torch.cuda.current_stream(self.device).wait_event(copy.end)

    def drain(self) -> None:
        for stream in (self._out, self._into):
            _poll(stream.query, 5.0)

    def copy(self, job: CopyJob, after: Mark | None = None) -> Completion:
        kv, stream = job.kv, self._out if job.to_origin else self._into
        if kv.device != self.device:
            raise LayoutError(
                f"the KV cache is on {kv.device}, but this copier is of {self.device}"
            )
        if not len(job.rows):
            return Finished(0.0)
        size = kernel.table_rows(kv, len(job.rows), len(job.origins))
        # Launches go to the thread's current device. Work is queued by stream handle: torch's
        # stream contexts and copies would cost the host as much as the rest of a retrieve.
        with (
            torch.cuda.device(self.device)
            if torch.cuda.current_device() != self.device.index
            else nullcontext()
        ):
            table = self._table(size, stream)
            parts = kernel.fill_table(kv, job.rows, job.origins, table.array)
            try:
                # Before the wait, so that the table travels while earlier work still computes.
                table.upload(size, self._driver, stream.cuda_stream)
                start, end = self._launch(stream, job, table, parts, after)
            except BaseException:
                # The current stream may not be waiting for the kernel, and the caller has no
                # completion: no kernel may be left running.
                stream.synchronize()
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
        stream: torch.cuda.Stream,
        job: CopyJob,
        table: kernel.Table,
        parts: Sequence[kernel.TablePart],
        after: Mark | None,
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Queue a kernel on `stream` for each part. Returns the events before and after the
        kernels."""
        current, start = torch.cuda.current_stream(), torch.cuda.Event(enable_timing=True)
        if isinstance(after, CudaMark):
            stream.wait_event(after.event)
        elif after is None:
            self._driver.follow(stream.cuda_stream, table.ready, current.cuda_stream)
        start.record(stream)
        most = 0 if job.local else self.max_ctas
        ctas = kernel.thread_blocks(local=job.local, host=job.host, most=most)
        how: dict[str, Any] = {"to_origin": job.to_origin, "stream": stream.cuda_stream}
        for part in parts:
            kernel.launch(part, table.there, ctas=ctas, **how)
        end = torch.cuda.Event(enable_timing=True)
        end.record(stream)
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
            # 4,096 tokens in blocks of 16, of 64 layers, need 384 rows.
            rows = max(1024, 1 << (rows - 1).bit_length())
            return kernel.Table(rows, self.device, self._driver)


def _poll(done: Callable[[], bool], timeout_s: float) -> bool:
    began = time.monotonic()
    while not done():
        waited = time.monotonic() - began
        if waited >= timeout_s:
            return False
        # Spin first: most copies take a millisecond or two, and even the shortest sleep takes some
        # 50 microseconds.
        if waited < 0.005:
            os.sched_yield()
        else:
            time.sleep(min(0.0001, timeout_s - waited))
    return True
