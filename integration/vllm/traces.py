"""OpenTelemetry spans of look-ups and loads in the scheduler, where vLLM's own tracing is on: children of its requests'."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from .lookups import Tracked


def begin(vllm_config: Any) -> Spans | None:
    """None where vLLM traces nothing."""
    endpoint = getattr(getattr(vllm_config, "observability_config", None), "otlp_traces_endpoint", None)
    with suppress(ImportError):
        return Spans() if endpoint else None
    return None


class Spans:
    """One span `vcache.lookup` a request, and one `vcache.load` a load, by the scheduler's clock: a synchronous one ends with its step.
    Nothing is raised: a load must not fail of its trace."""

    def __init__(self) -> None:
        """ImportError where there is no OpenTelemetry."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, self._context = trace.get_tracer("vcache"), TraceContextTextMapPropagator().extract
        self._known: set[str] = set()
        self._loads: dict[str, tuple[Any, bool]] = {}

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
        with suppress(Exception):
            said = {"vcache.tokens": tokens, "vcache.synchronous": synchronous}
            self._loads[tracked.request.request_id] = self._span("vcache.load", tracked, said), synchronous

    def stepped(self, loaded: Any) -> None:
        """A step is over, and with it its synchronous loads; and these requests' asynchronous ones."""
        for name in [name for name, (_, synchronous) in self._loads.items() if synchronous or name in (loaded or ())]:
            self._end(name)

    def finished(self, name: str) -> None:
        """The request has ended."""
        self._known.discard(name)
        self._end(name)

    def _end(self, name: str) -> None:
        span, _ = self._loads.pop(name, (None, False))
        if span is not None:
            with suppress(Exception):
                span.end()

    def _span(self, what: str, tracked: Tracked, said: dict[str, Any], seconds: float = 0.0) -> Any:
        context = self._context(tracked.request.trace_headers or {})
        said = {"gen_ai.request.id": tracked.request.request_id} | said
        return self._tracer.start_span(what, context, attributes=said, start_time=time.time_ns() - int(seconds * 1e9))
