"""A client of `/v1/completions`, over plain asyncio streams: sends jobs at given times, after
others, or a given number at once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import msgspec

HOST = "127.0.0.1"
LATE = "not answered in time"
TOKENS = b'"choices":[{'


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
    """A request to send. at, conversation: see `workloads.Request`."""

    body: bytes
    at: float | None = None
    conversation: int = -1


async def send(
    jobs: Sequence[Job], ports: Sequence[int], concurrency: int, seconds: float
) -> list[Answer]:
    """Send conversations and jobs with times at their times, the others `concurrency` at once, to
    the ports in turn. The answers in the jobs' order; those that are late after `seconds` have an
    error.
    """
    answers, started = [Answer(error=LATE) for _ in jobs], time.perf_counter()
    chains: dict[int, list[int]] = {}
    waiting: list[int] = []
    for index, job in enumerate(jobs):
        if job.at is None:
            waiting.append(index)
        else:
            chain = job.conversation if job.conversation >= 0 else -1 - index
            chains.setdefault(chain, []).append(index)
    pending, turn = iter(waiting), cycle(ports)

    async def ask(index: int) -> None:
        answer = answers[index]
        try:
            await complete(next(turn), jobs[index].body, answer)
            answer.error = "" if answer.tokens else "no tokens"
        except (OSError, ValueError, EOFError, KeyError) as error:
            answer.error = f"{type(error).__name__}: {error}"

    async def worker() -> None:
        for index in pending:
            await ask(index)

    async def follow(indices: Sequence[int]) -> None:
        begin = started
        for index in indices:
            await asyncio.sleep(begin + (jobs[index].at or 0.0) - time.perf_counter())
            await ask(index)
            begin = time.perf_counter()

    tasks = [asyncio.ensure_future(follow(indices)) for indices in chains.values()]
    tasks += [asyncio.ensure_future(worker()) for _ in range(concurrency)]
    _, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return answers


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
            if TOKENS in event:
                # An event of tokens is not parsed, which would make this process late.
                answer.first = answer.first or now
                answer.last = now
            elif event.startswith(b"data: {"):
                _note(json.loads(event[6:]), answer)
            elif event == b"data: [DONE]":
                return
    raise EOFError("the stream ended before [DONE]")


def _note(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise ValueError(str(event["error"])[:300])
    if (usage := event.get("usage")) is not None:
        answer.prompt, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached = details.get("cached_tokens") or 0
