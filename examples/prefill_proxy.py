"""A proxy in front of vLLM servers that share KV with vcache, some for prefill and some for decode.

    python examples/prefill_proxy.py --prefill http://127.0.0.1:8100 [http://127.0.0.1:8101 ...]
                                     --decode http://127.0.0.1:8200 [...] [--port 8000]

A completions request goes to one of each kind at the same time, those with the fewest requests. The
prefill server (`kv_role` kv_producer) computes the prompt, and one token that nobody reads. The
decode server (kv_consumer) is told that another instance computes this prompt: it waits for the
chunks and loads them, and its answer is streamed to the client. No server knows another, and
requests may reach any two of them in any order, since KV is found by the prompt's tokens.

If the prefill server fails, the decode server computes the prompt itself, after the deadline
(--wait-seconds) at most. The proxy says so. A prefill server that cannot be reached, or answers 502
to 504, is asked nothing for 10 s. If none is left, nothing is announced, so that the next requests
need not wait. If a decode server fails, its requests fail, and the next ones go to the others for
10 s, if there are others."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
except ModuleNotFoundError as absent:
    sys.exit(
        f"{Path(sys.argv[0]).name}: this Python has no {absent.name}, which vLLM brings: pip "
        "install '/path/to/vcache[vllm]'"
    )

ORDERS = ("together", "decode-first", "prefill-first")
LEAD_SECONDS = 0.5
"""How much later the prefill server is asked with `decode-first`."""
PAUSE_SECONDS = 10.0
"""For how long a server that failed is not asked."""
BROKEN = (502, 503, 504)
"""What a server answers that fails for every request. 500 may be a request's own fault."""
NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "max_completion_tokens",
    "n",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
)
MAX_BODY = 64 << 20


class Server:
    """running: its requests. paused_until: it is not asked before (time.monotonic)."""

    def __init__(self, url: str) -> None:
        self.url, self.running, self.paused_until = url.rstrip("/"), 0, 0.0


def not_paused(servers: list[Server]) -> list[Server]:
    return [one for one in servers if time.monotonic() >= one.paused_until]


def least(servers: list[Server], able: list[Server]) -> Server:
    """The one of `able` with the fewest requests; of those, each in turn."""
    chosen = min(able, key=lambda one: one.running)
    servers.append(servers.pop(servers.index(chosen)))
    return chosen


class Proxy:
    """The handlers. Runs in one event loop, and keeps nothing of a request that is answered."""

    def __init__(
        self, prefill: list[str], decode: list[str], order: str, wait_seconds: float
    ) -> None:
        self.prefill, self.decode = [[Server(url) for url in urls] for urls in (prefill, decode)]
        self.order = order
        self.announcement = {"announced": True, "wait_seconds": wait_seconds}
        self._numbers = itertools.count(1)
        self._session: ClientSession

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.post("/v1/completions", self.answer),
                web.post("/v1/chat/completions", self.answer),
            ]
        )
        app.add_routes([web.get("/{path:.*}", self.forward)])
        app.cleanup_ctx.append(self._connected)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Stream the decode server's answer. If the client goes away, the requests to both servers
        end."""
        try:
            body: dict[str, Any] = {} | json.loads(await request.read())
        except (ValueError, TypeError, RecursionError, web.RequestPayloadError):
            raise web.HTTPBadRequest(text="the body must be a JSON object") from None
        number, first = next(self._numbers), None
        able, (_, wishes) = not_paused(self.prefill), wishes_of(body)
        decode = least(self.decode, not_paused(self.decode) or self.decode)
        # What the prefill server may not store is not asked of it.
        stores = wishes is None or wishes.get("store") is not False
        announced = bool(able) and stores
        if announced:
            prefill = least(self.prefill, able)
            first = asyncio.create_task(self._prefill(number, prefill, request.path, body))
            if self.order == "prefill-first":
                announced = await first
        elif stores:
            say(
                f"request {number}: not announced, the prefill servers failed a moment ago; the "
                "decode server computes the prompt"
            )
        decode.running += 1
        try:
            asked = self._with_announcement(body) if announced else body
            return await self._stream(request, decode, asked)
        except ClientError as error:
            # One that refuses has no requests, so that it would get all of the next ones.
            decode.paused_until = time.monotonic() + PAUSE_SECONDS
            say(f"request {number}: the decode server failed: {type(error).__name__}: {error}")
            raise web.HTTPBadGateway(
                text=f"the decode server at {decode.url} failed: {error}"
            ) from error
        finally:
            decode.running -= 1
            if first is not None:
                first.cancel()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Forward a GET, such as /v1/models, /health and /metrics, to a decode server."""
        decode = (not_paused(self.decode) or self.decode)[0]
        try:
            async with self._session.get(decode.url + request.path_qs) as reply:
                return web.Response(
                    body=await reply.read(), status=reply.status, headers=content_type(reply)
                )
        except ClientError as error:
            raise web.HTTPBadGateway(
                text=f"the decode server at {decode.url} failed: {error}"
            ) from error

    async def _prefill(self, number: int, server: Server, path: str, body: dict[str, Any]) -> bool:
        """Have a prefill server compute the prompt. If that fails, say so and return False."""
        asked = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
        given, wishes = wishes_of(body)
        if wishes:
            # Otherwise a server with kv_both waits for itself.
            own = {name: value for name, value in wishes.items() if name not in self.announcement}
            asked["kv_transfer_params"] = {**given, "vcache": own}
        server.running += 1
        try:
            await asyncio.sleep(LEAD_SECONDS if self.order == "decode-first" else 0.0)
            async with self._session.post(
                server.url + path, json={**asked, "max_tokens": 1, "stream": False}
            ) as reply:
                text = await reply.text(errors="replace")
                if reply.ok:
                    return True
                what, broken = f"HTTP {reply.status}: {text[:200]}", reply.status in BROKEN
        except (ClientError, TimeoutError) as error:
            what, broken = f"{type(error).__name__}: {error}", True
        finally:
            server.running -= 1
        if broken:
            server.paused_until = time.monotonic() + PAUSE_SECONDS
        after = (
            ""
            if self.order == "prefill-first"
            else f", after {self.announcement['wait_seconds']:g} s at most"
        )
        say(
            f"request {number}: the prefill server failed ({what}); the decode server computes "
            f"the prompt itself{after}"
        )
        return False

    def _with_announcement(self, body: dict[str, Any]) -> dict[str, Any]:
        """Add `kv_transfer_params` that announce the request's KV. The client's own values there
        count; if they are no object, the decode server says so."""
        given, wishes = wishes_of(body)
        if wishes is None:
            return body
        announced = {**given, "vcache": {**self.announcement, **wishes}}
        return {**body, "kv_transfer_params": announced}

    async def _stream(
        self, request: web.Request, server: Server, body: dict[str, Any]
    ) -> web.StreamResponse:
        async with self._session.post(server.url + request.path, json=body) as reply:
            response = web.StreamResponse(status=reply.status, headers=content_type(reply))
            with suppress(ConnectionError):  # the client has gone
                await response.prepare(request)
                try:
                    async for piece in reply.content.iter_any():
                        await response.write(piece)
                except ClientError:
                    # It is too late for another status: the client sees that the answer is cut.
                    if request.transport is not None:
                        request.transport.close()
                    raise
                await response.write_eof()
            return response

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        # With a limit, requests that wait for KV would keep those away that have it computed. vLLM
        # closes connections after some errors and after 5 s, which a request would meet that is
        # just being sent: so each has a connection of its own.
        connections = TCPConnector(limit=0, force_close=True)
        timeout = ClientTimeout(total=None, sock_connect=5)
        async with ClientSession(connector=connections, timeout=timeout) as self._session:
            yield


def wishes_of(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The client's `kv_transfer_params`, and `vcache` in them; None if either is no object."""
    given = body.get("kv_transfer_params")
    given = {} if given is None else given
    wishes = given.get("vcache") if isinstance(given, dict) else given
    wishes = {} if wishes is None else wishes
    return given, wishes if isinstance(wishes, dict) else None


def content_type(reply: Any) -> dict[str, str]:
    return {"Content-Type": reply.headers.get("Content-Type", "application/json")}


def say(text: str) -> None:
    print(f"proxy: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    urls: dict[str, Any] = {"required": True, "metavar": "URL", "nargs": "+"}
    option("--prefill", **urls, help="the servers with kv_role kv_producer, or kv_both")
    option("--decode", **urls, help="the servers with kv_role kv_consumer")
    option("--host", default="127.0.0.1", help="where to listen (127.0.0.1)")
    option("--port", type=int, default=8000, help="where to listen (8000)")
    option(
        "--wait-seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="how long the decode server waits for KV (5)",
    )
    option(
        "--order",
        choices=ORDERS,
        default="together",
        help="which server is asked first (together): any order gives the same answer",
    )
    options = parser.parse_args()
    if not 0 <= options.wait_seconds <= 600:
        parser.error("--wait-seconds must be from 0 to 600: decode servers take no other")
    proxy = Proxy(options.prefill, options.decode, options.order, options.wait_seconds)
    web.run_app(
        proxy.application(),
        host=options.host,
        port=options.port,
        print=lambda *_: say(f"serves on http://{options.host}:{options.port}"),
        access_log=None,
        handler_cancellation=True,
    )


if __name__ == "__main__":
    main()
