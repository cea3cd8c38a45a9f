"""Data parallel ranks of one server, each asked by its number."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import msgspec

from ..processes import HOST, ChildFailed, until
from ..vllm.parts.groups import Ended
from .client import Answer, complete
from .servers import Servers
from .systems import MODEL, Sizes

RANKS = 2
TOKENS, LOGPROBS = 32, 5
"""Of an answer that is compared."""
ANSWER_SECONDS, SHARED_SECONDS = 60.0, 5.0


class Pair:
    """The ranks of one server."""

    def __init__(self, shape: str, seed: int, sizes: Sizes, servers: Servers) -> None:
        """seed: of the prompts."""
        self.shape, self.scale, self.servers = shape, sizes.scale, servers
        self.prompts = Ended(msgspec.structs.replace(sizes.scale, whole_blocks=True), seed=seed)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the server. If something failed, print what its log says of the cause."""
        if kind is not None:
            print(f"{self.shape}: FAILED first: {self.servers.causes()}", flush=True)
        self.servers.close()

    def ask(self, rank: int, tokens: list[int], salt: str, count: int = TOKENS) -> dict[str, Any]:
        """Have a rank answer: tokens, logprobs by step, as the server writes them, and how many
        tokens were cached. salt: requests with another one, or none, share nothing with it.
        """
        asked = _body(tokens, count) | ({"cache_salt": salt} if salt else {})
        asked |= {"logprobs": LOGPROBS, "return_token_ids": True}
        asked |= {"return_tokens_as_token_ids": True}
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        url = f"http://{HOST}:{self.servers.ports[0]}/v1/completions"
        request = urllib.request.Request(url, msgspec.json.encode(asked), headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
                answer: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise ChildFailed(f"rank {rank}: {error}: {said}") from error
        (choice,) = answer["choices"]
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        steps = choice["logprobs"]["top_logprobs"]
        return {"tokens": choice["token_ids"], "logprobs": steps, "cached": cached}

    def timed(self, rank: int, tokens: list[int]) -> Answer:
        """Have a rank answer with one token, and take the time until it comes."""
        answer = Answer()
        asyncio.run(self.stream(rank, tokens, 1, answer))
        return answer

    async def stream(self, rank: int, tokens: list[int], count: int, answer: Answer) -> None:
        """Have a rank answer, and note when."""
        body = _body(tokens, count)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        asked = complete(self.servers.ports[0], msgspec.json.encode(body), answer, rank)
        await asyncio.wait_for(asked, ANSWER_SECONDS)

    def reset(self) -> None:
        """Empty all caches. Through a pool a reset is over after a rank's next step; and a rank
        shares nothing before its first one, in which its worker describes itself.
        """
        self.servers.reset()
        for rank in (*range(RANKS), *range(RANKS)):
            self.ask(rank, self.prompts.new(self.scale.block), "", 1)

    def came(self, before: int, tokens: list[int]) -> None:
        """Wait until the chunks of a prompt that a rank has just computed can be read by the other.
        before: chunks that could be by then. ChildFailed if no further one can be.
        """
        due = before + len(tokens) // self.scale.chunk
        if until(lambda: self.servers.shared() >= due, SHARED_SECONDS):
            return
        shared = self.servers.shared()
        said = f"{shared} chunks can be read where {due} were due; {self.servers.said()}"
        if shared <= before:
            raise ChildFailed(said)
        print(f"  {said}", flush=True)

    def computed(self, rank: int, tokens: list[int], salt: str = "") -> None:
        """Have a rank compute a prompt that the other can read then."""
        before = self.servers.shared()
        self.ask(rank, tokens, salt, 1)
        self.came(before, tokens)


def _body(tokens: list[int], count: int) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": tokens, "max_tokens": count}
    return asked | {"temperature": 0, "ignore_eos": True}
