"""A client of `/v1/completions`: sends requests at given times, after others, or a given number at
once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from ..processes import HOST
from .workloads import Request

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
    error: str = LATE


async def send(
    requests: Sequence[Request], ports: Sequence[int], concurrency: int, seconds: float
) -> list[Answer]:
    """Send conversations and requests with times at their times, the others `concurrency` at once,
    to the ports in turn. The answers in the requests' order; those that are late after `seconds`
    have an error.
    """
    answers, started, turn = [Answer() for _ in requests], time.perf_counter(), cycle(ports)
    chains: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        if request.at is not None:
            chain = request.conversation if request.conversation >= 0 else -1 - index
            chains.setdefault(chain, []).append(index)
    waiting = iter([index for index, request in enumerate(requests) if request.at is None])

    async def follow(session: ClientSession, indices: Iterable[int]) -> None:
        begin = started
        for index in indices:
            if (at := requests[index].at) is not None:
                await asyncio.sleep(begin + at - time.perf_counter())
            await complete(session, next(turn), requests[index].body, answers[index])
            begin = time.perf_counter()

    connections = TCPConnector(limit=0, force_close=True)
    async with ClientSession(connector=connections, timeout=ClientTimeout(None)) as session:
        chained = [*chains.values(), *[waiting] * concurrency]
        tasks = [asyncio.ensure_future(follow(session, indices)) for indices in chained]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    return answers


async def complete(session: ClientSession, port: int, body: bytes, answer: Answer) -> None:
    """Send one request and note its times, or its error."""
    answer.sent = time.perf_counter()
    url, kind = f"http://{HOST}:{port}/v1/completions", {"Content-Type": "application/json"}
    try:
        async with session.post(url, data=body, headers=kind) as reply:
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {(await reply.text())[:300]}")
            async for event in reply.content:
                if TOKENS in event:
                    # An event of tokens is not parsed, which would make this process late.
                    answer.last = time.perf_counter()
                    answer.first = answer.first or answer.last
                elif event.startswith(b"data: {"):
                    _note(json.loads(event[6:]), answer)
                elif event.startswith(b"data: [DONE]"):
                    answer.error = "" if answer.tokens else "no tokens"
                    return
        raise ValueError("the stream ended before [DONE]")
    except (OSError, ClientError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"


def _note(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise ValueError(str(event["error"])[:300])
    if (usage := event.get("usage")) is not None:
        answer.prompt, answer.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached = details.get("cached_tokens") or 0
