"""OpenTelemetry spans of look-ups and loads, where vLLM's own tracing is on: children of its requests'. The scheduler's half makes all of
them, the workers' by the times that they report: no process needs an exporter but that of vLLM's engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from .metadata import LoadSpan
from .tracked import Tracked

MOST_LOADS = 1024
"""Of which workers have not said that they are over; the oldest one's span ends then."""


def wanted(vllm_config: Any) -> bool:
    """Whether vLLM traces."""
    return bool(getattr(getattr(vllm_config, "observability_config", None), "otlp_traces_endpoint", None))


def begin(vllm_config: Any, workers: int) -> Spans | None:
    """None where vLLM traces nothing."""
    with suppress(ImportError):
        return Spans(workers) if wanted(vllm_config) else None
    return None


class Spans:
    """One span `vcache.lookup` a request, and one `vcache.load` a load, from when vLLM has reserved its blocks until the last worker has
    them; within it one `vcache.load.worker` for each. Nothing is raised: a load must not fail of its trace."""

    def __init__(self, workers: int) -> None:
        """ImportError where there is no OpenTelemetry."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer: Any = trace.get_tracer("vcache")
        self._context = TraceContextTextMapPropagator().extract
        if hasattr(
            self._tracer, "id_generator"
        ):  # the SDK's own draws from the generator that vLLM seeds alike in every instance
            self._tracer.id_generator = _Names()
        self._within, self._workers = trace.set_span_in_context, workers
        self._known: set[str] = set()
        self._loads: dict[str, tuple[Any, list[int]]] = {}
        """By request: the span, and when workers were over."""

    def looked_up(self, tracked: Tracked, local: int, found: int) -> None:
        """The pool has so many tokens after the first `local`. The first time that a request is matched."""
        name = tracked.request.request_id
        if name in self._known:
            return
        self._known.add(name)
        with suppress(Exception):
            seconds = tracked.answer.seconds if tracked.answer is not None else 0.0
            span = self._span("vcache.lookup", tracked, {"vcache.local_tokens": local, "vcache.found_tokens": found}, seconds)
            span.end()

    def loading(self, tracked: Tracked, tokens: int, synchronous: bool) -> None:
        """The load of so many tokens begins."""
        name = tracked.request.request_id
        self._end(name)
        if len(self._loads) == MOST_LOADS:
            self._end(next(iter(self._loads)))
        with suppress(Exception):
            said = {"vcache.tokens": tokens, "vcache.synchronous": synchronous}
            self._loads[name] = self._span("vcache.load", tracked, said), []

    def loaded(self, spans: Iterable[LoadSpan]) -> None:
        """Workers are over with these; also of requests that have ended."""
        for one in spans:
            span, ended = self._loads.get(one.request_id, (None, []))
            if span is not None:
                ended.append(one.ended)
                with suppress(Exception):
                    self._tracer.start_span(
                        "vcache.load.worker", self._within(span), attributes=_said(one), start_time=one.began
                    ).end(one.ended)
                if len(ended) == self._workers:
                    self._end(one.request_id)

    def finished(self, name: str) -> None:
        """The request has ended."""
        self._known.discard(name)

    def _end(self, name: str) -> None:
        span, ended = self._loads.pop(name, (None, []))
        if span is not None:
            with suppress(Exception):
                span.end(max(ended) if ended else None)

    def _span(self, what: str, tracked: Tracked, said: dict[str, Any], seconds: float = 0.0) -> Any:
        context = self._context(tracked.request.trace_headers or {})
        said = {"gen_ai.request.id": tracked.request.request_id} | said
        return self._tracer.start_span(what, context, attributes=said, start_time=time.time_ns() - int(seconds * 1e9))


class _Names:
    """Of spans and traces, from the system's random numbers, as the SDK asks for them."""

    def generate_span_id(self) -> int:
        return secrets.randbelow((1 << 64) - 1) + 1

    def generate_trace_id(self) -> int:
        return secrets.randbelow((1 << 128) - 1) + 1

    def is_trace_id_random(self) -> bool:
        return True


def _said(one: LoadSpan) -> dict[str, Any]:
    said = {"gen_ai.request.id": one.request_id, "vcache.worker": one.worker, "vcache.bytes": sum(one.nbytes.values())}
    said |= {f"vcache.bytes.{where}": nbytes for where, nbytes in one.nbytes.items()}
    said |= {"vcache.metadata_seconds": one.metadata_seconds, "vcache.data_seconds": one.data_seconds}
    return said | ({"vcache.failure": one.failure} if one.failure else {})
