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
from ..requests import Tracked


def wanted(vllm_config: Any) -> bool:
    """Whether vLLM traces."""
    return bool(vllm_config.observability_config.otlp_traces_endpoint)


def begin(vllm_config: Any) -> Spans | None:
    """Make the spans' recorder; None if vLLM does not trace."""
    return Spans() if wanted(vllm_config) else None


class Spans:
    """Makes a span `vcache.lookup` for each request, and a span `vcache.load` for each worker's
    part of a load. Runs in the scheduler's thread. Never raises."""

    def __init__(self) -> None:
        # vLLM traces only with OpenTelemetry.
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer: Any = trace.get_tracer("vcache")
        self._context = TraceContextTextMapPropagator().extract
        if hasattr(self._tracer, "id_generator"):
            self._tracer.id_generator = _Names()
        self._requests: dict[str, Any] = {}
        """The contexts of the requests that were looked up and have not ended."""

    def looked_up(self, tracked: Tracked, local: int, found: int) -> None:
        """Record a look-up that found `found` tokens after the first `local`. Only a request's
        first look-up makes a span."""
        name, answer, wait = tracked.request.request_id, tracked.lookup.answer, tracked.wait
        if name in self._requests:
            return
        with suppress(Exception):
            self._requests[name] = self._context(tracked.request.trace_headers or {})
            said = {
                "vcache.local_tokens": local,
                "vcache.found_tokens": found,
                "vcache.waited_seconds": wait.seconds,
                "vcache.waited_tokens": wait.tokens,
                "vcache.wait_end": wait.end,
            }
            now, seconds = time.time_ns(), answer.seconds if answer is not None else 0.0
            self._span("vcache.lookup", name, said, now - int(seconds * 1e9), now)

    def loaded(self, loads: Iterable[LoadSpan]) -> None:
        """Add the workers' spans of requests that have not ended."""
        for load in loads:
            with suppress(Exception):
                self._span("vcache.load", load.request_id, load.said, load.began, load.ended)

    def finished(self, name: str) -> None:
        """Forget a request that has ended."""
        self._requests.pop(name, None)

    def _span(self, what: str, name: str, said: dict[str, Any], began: int, ended: int) -> None:
        """began, ended: in nanoseconds of the wall clock."""
        if name in self._requests:
            said = {"gen_ai.request.id": name} | said
            begin = self._tracer.start_span
            begin(what, self._requests[name], attributes=said, start_time=began).end(ended)


class _Names:
    """The SDK's id generator on the system's random numbers: vLLM seeds Python's generator alike in
    every instance."""

    def generate_span_id(self) -> int:
        return secrets.randbelow((1 << 64) - 1) + 1

    def generate_trace_id(self) -> int:
        return secrets.randbelow((1 << 128) - 1) + 1

    def is_trace_id_random(self) -> bool:
        return True
