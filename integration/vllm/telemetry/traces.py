"""OpenTelemetry spans of look-ups and loads, as children of vLLM's request spans, if vLLM traces.

The scheduler's half makes all spans; workers report their times. So only the engine's process needs
an exporter."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ..metadata import LoadSpan
from ..scheduler.tracked import Tracked

MOST_LOADS = 1024
"""The most loads with an open span; beyond it the oldest span ends."""


def wanted(vllm_config: Any) -> bool:
    """Whether vLLM traces."""
    return bool(vllm_config.observability_config.otlp_traces_endpoint)


def begin(vllm_config: Any, workers: int) -> Spans | None:
    """Make the spans' recorder; None if vLLM does not trace."""
    with suppress(ImportError):
        return Spans(workers) if wanted(vllm_config) else None
    return None


class Spans:
    """Makes one span `vcache.lookup` for each request, and one `vcache.load` for each load.

    `vcache.load` lasts from the reservation of blocks until the last worker is done, and contains
    one `vcache.load.worker` for each worker. Runs in the scheduler's thread. Never raises."""

    def __init__(self, workers: int) -> None:
        """ImportError without OpenTelemetry."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer: Any = trace.get_tracer("vcache")
        self._context = TraceContextTextMapPropagator().extract
        if hasattr(self._tracer, "id_generator"):
            self._tracer.id_generator = _Names()
        self._within, self._workers = trace.set_span_in_context, workers
        self._known: set[str] = set()
        self._loads: dict[str, tuple[Any, list[int]]] = {}
        """By request: the span, and the times at which workers finished (nanoseconds of the wall
        clock)."""

    def looked_up(self, tracked: Tracked, local: int, found: int) -> None:
        """Record a look-up that found so many tokens after the first `local`. Only a request's
        first look-up makes a span."""
        name = tracked.request.request_id
        if name in self._known:
            return
        self._known.add(name)
        with suppress(Exception):
            seconds = tracked.lookup.answer.seconds if tracked.lookup.answer is not None else 0.0
            said: dict[str, Any] = {"vcache.local_tokens": local, "vcache.found_tokens": found}
            wait = tracked.wait
            said["vcache.waited_seconds"] = wait.seconds
            said["vcache.waited_tokens"] = wait.tokens
            said["vcache.wait_end"] = wait.end
            self._span("vcache.lookup", tracked, said, seconds).end()

    def loading(self, tracked: Tracked, tokens: int) -> None:
        """Begin the span of a load of so many tokens."""
        name = tracked.request.request_id
        self._end(name)
        if len(self._loads) == MOST_LOADS:
            self._end(next(iter(self._loads)))
        with suppress(Exception):
            self._loads[name] = self._span("vcache.load", tracked, {"vcache.tokens": tokens}), []

    def loaded(self, spans: Iterable[LoadSpan]) -> None:
        """Add the workers' spans, and end a load's span after its last worker. The request may have
        ended before."""
        for part in spans:
            span, ended = self._loads.get(part.request_id, (None, []))
            if span is not None:
                ended.append(part.ended)
                with suppress(Exception):
                    said = {"attributes": _said(part), "start_time": part.began}
                    begin = self._tracer.start_span
                    begin("vcache.load.worker", self._within(span), **said).end(part.ended)
                if len(ended) == self._workers:
                    self._end(part.request_id)

    def finished(self, name: str) -> None:
        """Forget a request that has ended."""
        self._known.discard(name)

    def _end(self, name: str) -> None:
        span, ended = self._loads.pop(name, (None, []))
        if span is not None:
            with suppress(Exception):
                span.end(max(ended) if ended else None)

    def _span(self, what: str, tracked: Tracked, said: dict[str, Any], seconds: float = 0.0) -> Any:
        context = self._context(tracked.request.trace_headers or {})
        said = {"gen_ai.request.id": tracked.request.request_id} | said
        began = time.time_ns() - int(seconds * 1e9)
        return self._tracer.start_span(what, context, attributes=said, start_time=began)


class _Names:
    """The SDK's id generator on the system's random numbers: vLLM seeds Python's generator alike in
    every instance."""

    def generate_span_id(self) -> int:
        return secrets.randbelow((1 << 64) - 1) + 1

    def generate_trace_id(self) -> int:
        return secrets.randbelow((1 << 128) - 1) + 1

    def is_trace_id_random(self) -> bool:
        return True


def _said(part: LoadSpan) -> dict[str, Any]:
    said = {
        "gen_ai.request.id": part.request_id,
        "vcache.worker": part.worker,
        "vcache.bytes": sum(part.nbytes.values()),
    }
    said |= {f"vcache.bytes.{where}": nbytes for where, nbytes in part.nbytes.items()}
    said |= {
        "vcache.metadata_seconds": part.metadata_seconds,
        "vcache.data_seconds": part.data_seconds,
    }
    return said | ({"vcache.failure": part.failure} if part.failure else {})
