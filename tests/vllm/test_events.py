"""The connector's KV events, beside vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_objects import through_vllm

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vcache_backend.errors import ServerTimeout
from vcache_backend.integration.vllm.metadata import WorkerReport
from vcache_backend.integration.vllm.telemetry import events
from vcache_backend.integration.vllm.telemetry.events import Announcer
from vcache_backend.protocol.messages import KEY_BYTES, ChunkKey, of_rank

BLOCK = 16


@pytest.fixture(autouse=True)
def _hashes() -> None:
    """vLLM's hash of nothing, which the engine sets at start."""
    kv_cache_utils.init_none_hash(sha256)


def make_request(tokens: int, **arguments: Any) -> Request:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    params, prompt = SamplingParams(max_tokens=1), list(range(tokens))
    return Request("r", prompt, params, None, block_hasher=hasher, **arguments)


def vllms_own_event(request: Request, start: int, end: int) -> Any:
    """What vLLM's prefix cache publishes for the tokens, if they are one block of its table."""
    tells = {"enable_caching": True, "enable_kv_cache_events": True}
    pool, size = BlockPool(num_gpu_blocks=64, hash_block_size=BLOCK, **tells), end - start
    blocks = pool.get_new_blocks(end // size)
    for block in range(end // size):
        pool.cache_full_blocks(request, blocks, block, block + 1, size, 0)
    return pool.take_events()[-1]


LORA = {"lora_request": LoRARequest("french", 3, "/nowhere")}
_SEEN = [
    MultiModalFeatureSpec(None, "image", f"{number}", PlaceholderRange(offset, 20))
    for number, offset in enumerate((5, 70))
]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"cache_salt": "pepper"}, LORA, {"mm_features": _SEEN}],
    ids=["plain", "salt", "lora", "images"],
)
@pytest.mark.parametrize("first", [0, 4])
def test_a_chunks_event_is_vllms_own_for_one_block_of_its_size_but_for_the_medium(
    arguments: dict[str, Any], first: int
) -> None:
    request = make_request(8 * BLOCK + 5, **arguments)
    tokens = first * BLOCK, (first + 4) * BLOCK
    ours = events.block_stored(request, *tokens, BLOCK)
    theirs = vllms_own_event(request, *tokens)
    assert (ours.medium, ours.locality) == ("CPU", "LOCAL")
    names = {*theirs.__struct_fields__} - {"medium", "locality"}
    same = {name: getattr(theirs, name) for name in names}
    assert {name: getattr(ours, name) for name in same} == same
    assert (ours.parent_block_hash is None) == (first == 0)


class Ranks:
    """A scheduler's announcer, what ranks do to the pool, and what the server finds there. The
    chunks are those of one request.
    """

    def __init__(self, ranks: int) -> None:
        self.announcer, self._request = Announcer(ranks), make_request(8 * BLOCK)
        self.there, self.asked = set[ChunkKey](), list[int]()

    def last(self, chunk: int) -> bytes | int:
        """The chunk's last block as it is published."""
        return self._event(chunk).block_hashes[-1]

    def _event(self, chunk: int) -> BlockStored:
        return events.block_stored(self._request, 2 * chunk * BLOCK, 2 * (chunk + 1) * BLOCK, BLOCK)

    def order(self, *chunks: int) -> None:
        """A step stores them."""
        for chunk in chunks:
            self.announcer.expect(key_of(chunk), self._event(chunk))

    def step(self, *did: dict[int, list[int]]) -> list[tuple[str, bytes | int]]:
        """What is published after a step in which workers stored these chunks, by rank."""
        stored = [
            {rank: [key_of(chunk) for chunk in chunks] for rank, chunks in of_worker.items()}
            for of_worker in did
        ]
        told = [{"kv_connector_worker_meta": WorkerReport(stored=one)} for one in stored]
        output = through_vllm(*told)
        self.announcer.note(output.kv_connector_worker_meta.stored)
        for rank, keys in output.kv_connector_worker_meta.stored.items():
            self.there |= set(of_rank(keys, rank))
        return self.taken()

    def taken(self) -> list[tuple[str, bytes | int]]:
        return [(type(event).__name__, event.block_hashes[-1]) for event in self.announcer.take()]

    def contains(self, keys: list[ChunkKey]) -> list[bool]:
        """As the server answers."""
        self.asked.append(len(keys))
        return [key in self.there for key in keys]


def key_of(chunk: int, rank: int = 0) -> ChunkKey:
    return ChunkKey(bytes([chunk]) * (KEY_BYTES - 2) + rank.to_bytes(2, "big"))


def test_a_chunk_is_announced_when_every_rank_has_stored_it() -> None:
    """In another step than the first one's, together with chunks of which one is new to both;
    however often a rank says so.
    """
    two = Ranks(2)
    two.order(1, 2, 3)
    assert two.step({0: [1, 1]}, {}) == []
    whole = [("BlockStored", two.last(chunk)) for chunk in (1, 3)]
    assert two.step({0: [3]}, {1: [1, 2, 3]}) == whole
    assert two.step({0: [2]}, {}) == [("BlockStored", two.last(2))]
    assert two.step({0: []}, {}) == []


def test_a_chunk_is_gone_with_its_first_part_and_that_is_said_once() -> None:
    """And of what was stored again since the server was asked, nothing is said."""
    two = Ranks(2)
    two.order(1, 2)
    two.step({0: [1, 2]}, {1: [1, 2]})
    for _ in range(2):
        two.announcer.check(two.contains)
        assert two.taken() == []
    two.there.remove(key_of(1, rank=1))
    two.announcer.check(two.contains)
    two.announcer.check(two.contains)
    assert two.taken() == [("BlockRemoved", two.last(1))]
    two.announcer.check(two.contains)
    assert two.taken() == []
    two.there.remove(key_of(2))
    two.announcer.check(two.contains)
    two.order(2)
    assert two.step({0: [2]}, {1: [2]}) == [("BlockStored", two.last(2))]
    two.there.remove(key_of(2))
    two.announcer.check(two.contains)
    assert two.taken() == [("BlockRemoved", two.last(2))]


def test_a_slow_server_has_its_deadline_for_each_request_and_what_it_did_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All by one deadline would end the scheduler's connection, and with it every hit."""
    monkeypatch.setattr(events, "MAX_KEYS", 2)
    one = Ranks(1)
    one.order(0, 1, 2, 3)
    one.step({0: [0, 1, 2, 3]})
    one.announcer.check(one.contains)
    assert one.asked == [2, 2]
    one.there.clear()

    def late(keys: list[ChunkKey]) -> list[bool]:
        if key_of(2) in keys:
            raise ServerTimeout("late")
        return one.contains(keys)

    with pytest.raises(ServerTimeout):
        one.announcer.check(late)
    assert one.taken() == [("BlockRemoved", one.last(chunk)) for chunk in (0, 1)]
    one.announcer.check(one.contains)
    assert one.taken() == [("BlockRemoved", one.last(chunk)) for chunk in (2, 3)]


def test_chunks_that_never_become_complete_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 2)
    two = Ranks(2)
    for chunk in (1, 2, 3):
        two.order(chunk)
        two.step({0: [chunk]}, {})
    # The first one was dropped for the third.
    whole = [("BlockStored", two.last(chunk)) for chunk in (3, 2)]
    assert two.step({1: [3, 2, 1]}, {}) == whole


# ---- what workers say of the offload tier
