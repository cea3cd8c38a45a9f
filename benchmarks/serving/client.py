"""A client of `/v1/completions`, over plain asyncio streams: sends jobs at given times, or a given
number at once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import msgspec

HOST = "127.0.0.1"


class Answer(msgspec.Struct, kw_only=True):
    """One answer. Times are in seconds on this process's clock; 0: that point was not reached.
    error: why the answer is incomplete.
    """

    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    error: str = ""


class Job(msgspec.Struct, frozen=True):
    """A request to send: the server's port, the body, and when."""

    port: int
    body: bytes
    at: float | None = None


class Run:
    """Runs a list of jobs, and collects their answers in the jobs' order. Used by one event
    loop.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self.answers: list[Answer] = [Answer(error="not sent") for _ in jobs]
        self.started = 0.0

    async def go(self, concurrency: int, seconds: float) -> None:
        """Send jobs with times at their times, the others `concurrency` at once. Jobs that are
        unanswered after `seconds` get an error.
        """
        self.started = time.perf_counter()
        timed = [index for index, job in enumerate(self._jobs) if job.at is not None]
        waiting = iter([index for index, job in enumerate(self._jobs) if job.at is None])

        async def worker() -> None:
            for index in waiting:
                await self._ask(index)

        tasks = [asyncio.ensure_future(self._ask(index)) for index in timed]
        tasks += [asyncio.ensure_future(worker()) for _ in range(concurrency)]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _ask(self, index: int) -> None:
        job, answer = self._jobs[index], self.answers[index]
        if job.at is not None:
            await asyncio.sleep(max(0.0, self.started + job.at - time.perf_counter()))
        answer.error = "not answered in time"
        try:
            await complete(job.port, job.body, answer)
            answer.error = "" if answer.tokens else answer.error or "no tokens"
        except (OSError, ValueError, EOFError, KeyError) as error:
            answer.error = f"{type(error).__name__}: {error}"


async def complete(port: int, body: bytes, answer: Answer) -> None:
    """Send one request and note its times.

    Raises OSError, ValueError or EOFError if the answer is not a completion's stream.
    """
    answer.sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: "
            "application/json\r\nConnection: close\r\n"
        )
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        headers = b""
        while (line := await reader.readline()) not in (b"\r\n", b""):
            headers += line
        if status.split(b" ")[1:2] != [b"200"] or b"chunked" not in headers.lower():
            rest = await reader.read(2000)
            raise ValueError(
                f"{status.decode(errors='replace').strip()}: {rest.decode(errors='replace')[:300]}"
            )
        await _stream(reader, answer)
    finally:
        writer.close()


async def _stream(reader: asyncio.StreamReader, answer: Answer) -> None:
    """Read server-sent events up to `[DONE]`."""
    kept = b""
    while line := await reader.readline():
        size = int(line, 16)
        kept += await reader.readexactly(size)
        await reader.readexactly(2)
        now = time.perf_counter()
        *events, kept = kept.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                _note(json.loads(event[6:]), now, answer)
            elif event == b"data: [DONE]":
                return
    raise EOFError("the stream ended before [DONE]")


def _note(event: dict[str, object], now: float, answer: Answer) -> None:
    if "error" in event:
        raise ValueError(str(event["error"])[:300])
    if event.get("choices"):
        answer.first = answer.first or now
        answer.last = now
    if (usage := event.get("usage")) is not None:
        said = msgspec.convert(usage, Usage)
        answer.prompt, answer.tokens = said.prompt_tokens, said.completion_tokens
        answer.cached = (said.prompt_tokens_details or Details()).cached_tokens or 0


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The token counts in the stream's last event."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: Details | None = None
