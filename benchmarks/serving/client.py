"""A client of `/v1/completions`: sends requests at given times, after others, or a given number at
once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from ..processes import HOST
from .systems import mooncake_peer
from .workloads import Request

LATE = "not answered in time"
TOKENS = b'"choices":[{'


class Answer(msgspec.Struct, kw_only=True):
    """One answer. Times are in seconds on this process's clock; 0: that point was not reached.
    handed: when the prefill server had answered. gaps: seconds between two tokens. error: why the
    answer is incomplete.
    """

    sent: float = 0.0
    handed: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = []
    prompt: int = 0
    cached: int = 0
    tokens: int = 0
    error: str = LATE


async def send(
    requests: Sequence[Request],
    ports: Sequence[int],
    concurrency: int,
    seconds: float,
    apart: str = "",
    prefills: int = 0,
) -> list[Answer]:
    """Send conversations and requests with times at their times, the others `concurrency` at once,
    to the ports in turn. The answers in the requests' order; those that are late after `seconds`
    have an error. apart: see `System`. prefills: the first of the ports, of servers that compute
    prompts then.
    """
    answers, started = [Answer() for _ in requests], time.perf_counter()
    pairs = _pairs(ports, prefills)
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
            (prefill, port), request, answer = next(pairs), requests[index], answers[index]
            if apart:
                await _apart(session, apart, prefill, port, request, answer)
            else:
                await complete(session, port, request.body, answer)
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


def _pairs(ports: Sequence[int], prefills: int) -> Iterator[tuple[int, int]]:
    """For each request the ports of its prefill server, or 0, and of the one that answers. Each of
    the first meets each of the others."""
    answering = ports[prefills:]
    for n in count():
        rounds, which = divmod(n, prefills) if prefills else (0, 0)
        yield ports[which] if prefills else 0, answering[(n + rounds) % len(answering)]


async def _apart(
    session: ClientSession, apart: str, first: int, port: int, request: Request, answer: Answer
) -> None:
    """Ask a prefill server and a decode server: both at once, as examples/prefill_proxy.py and
    vLLM's proxy for Mooncake do. With `after` and NIXL the prefill server first: with NIXL its
    answer says where the KV lies."""
    sent, asked, given = time.perf_counter(), dict[str, Any](), dict[str, Any]()
    # NIXL's push and Mooncake know a request by its name.
    name = f"{first}-{time.perf_counter_ns()}"
    if apart == "announced":
        given = {"vcache": {"announced": True, "wait_seconds": 60}}
    elif apart != "after":
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
    if apart == "mooncake":
        asked |= {"transfer_id": name}
        given = asked | {"do_remote_decode": False, "do_remote_prefill": True}
        given |= mooncake_peer(first)
    body = _with(request.first, asked)
    prefill = asyncio.ensure_future(_first(session, first, body, answer, name))
    try:
        if apart in ("after", "nixl"):
            given = (await prefill)["kv_transfer_params"] or {}
        await complete(session, port, _with(request.body, given), answer, name)
    except (OSError, ClientError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    await asyncio.gather(prefill, return_exceptions=True)
    answer.sent = sent


async def _first(session: ClientSession, port: int, body: bytes, answer: Answer, name: str) -> Any:
    """Have a prefill server compute a prompt. What it says."""
    url, headers = _address(port, name)
    async with session.post(url, data=body, headers=headers) as reply:
        text = await reply.read()
        answer.handed = time.perf_counter()
        if reply.status != 200:
            raise ValueError(f"{reply.status}: {text[:300]!r}")
        return json.loads(text)


def _with(body: bytes, params: dict[str, Any]) -> bytes:
    """A body with these `kv_transfer_params`."""
    return body[:-1] + b',"kv_transfer_params":' + json.dumps(params).encode() + b"}"


def _address(port: int, name: str) -> tuple[str, dict[str, str]]:
    """A request's URL and headers. name: of the request; empty: the server gives it one."""
    headers = {"Content-Type": "application/json"} | ({"X-Request-Id": name} if name else {})
    return f"http://{HOST}:{port}/v1/completions", headers


async def complete(
    session: ClientSession, port: int, body: bytes, answer: Answer, name: str = ""
) -> None:
    """Send one request and note its times, or its error. name: see `_address`."""
    answer.sent = time.perf_counter()
    url, headers = _address(port, name)
    try:
        async with session.post(url, data=body, headers=headers) as reply:
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {(await reply.text())[:300]}")
            async for event in reply.content:
                if TOKENS in event:
                    # An event of tokens is not parsed, which would make this process late.
                    now = time.perf_counter()
                    if answer.first:
                        answer.gaps.append(now - answer.last)
                    answer.last, answer.first = now, answer.first or now
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
