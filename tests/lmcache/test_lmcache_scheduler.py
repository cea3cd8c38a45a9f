"""After a failed load and a reset: what vLLM's prefix cache, its requests and the workers of LMCache
may go on with, beside vLLM's own block pool."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.block_pool", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vcache_backend.integration.lmcache.scheduler import RESET, LMCacheScheduler

BLOCK = 4


@dataclass
class LoadSpec:
    """LMCache's, which lies beside its adapter."""

    vllm_cached_tokens: int
    lmcache_cached_tokens: int
    can_load: bool


class Client:
    """LMCache's, whose workers answer `answer`."""

    def __init__(self) -> None:
        self.answer, self.asked = 1, list[Any]()

    def lookup(self, tokens: list[int], name: str, configs: dict[str, Any]) -> int:
        self.asked.append((name, configs))
        return self.answer

    def clear_lookup_status(self, name: str) -> None:
        pass


class Adapter:
    """LMCache's, as far as it is replaced."""

    _lmcache_chunk_size = BLOCK

    def __init__(self) -> None:
        self.lookup_client, self.load_specs = Client(), dict[str, LoadSpec]()
        self._request_trackers: dict[str, Any] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int:
        return BLOCK

    def request_finished(self, request: Any, block_ids: list[int]) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace()


class Scheduler:
    """vLLM's, of which only the block pool is real."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self.adapter = Adapter()
        self.connector = SimpleNamespace(
            _lmcache_engine=self.adapter, update_connector_output=lambda output: None
        )
        self.pool = BlockPool(16, enable_caching=True, hash_block_size=BLOCK)
        LMCacheScheduler(self.connector)
        self.connector.bind_gpu_block_pool(self.pool)

    def begin(self, name: str, tokens: list[int]) -> Request:
        hasher, given = get_request_block_hasher(BLOCK, sha256), SamplingParams(max_tokens=1)
        request = Request(name, tokens, given, None, block_hasher=hasher)
        request.blocks = self.pool.get_new_blocks(len(tokens) // BLOCK)
        self.adapter._request_trackers[name] = request
        return request

    def compute(self, request: Request, first: int, stop: int) -> None:
        """vLLM plans a step that computes these blocks."""
        self.pool.cache_full_blocks(request, request.blocks, first, stop, BLOCK, 0)

    def cached(self, request: Request) -> list[bool]:
        return [bool(self.pool.get_cached_block(one, [0])) for one in request.block_hashes]

    def end_step(self, invalid: set[int]) -> None:
        self.connector.update_connector_output(SimpleNamespace(invalid_block_ids=invalid))

    def word(self) -> Any:
        return self.adapter.build_connector_meta(SimpleNamespace()).vcache


@pytest.mark.parametrize("how", ["failed load", "reset"])
def test_nothing_that_a_request_computes_after_it_reaches_a_later_request(how: str) -> None:
    """Its blocks are neither found nor stored, nor those that it had; a later request's are."""
    vllm = Scheduler()
    before, tokens = vllm.begin("before", [*range(12)]), [*range(12)]
    vllm.compute(before, 0, 2)
    vllm.end_step(set())
    assert (vllm.cached(before), vllm.word()[1:]) == ([True, True, False], (0, frozenset()))
    if how == "reset":
        assert vllm.connector.reset_cache()
        assert vllm.adapter.lookup_client.asked == [(RESET, {RESET: 1})]
    else:
        vllm.end_step({before.blocks[0].block_id})
    assert vllm.cached(before) == [False] * 3
    later = vllm.begin("later", tokens)
    vllm.compute(later, 0, 2)
    vllm.compute(before, 2, 3)
    if hasattr(vllm.pool, "cache_partial_block"):  # not in every supported vLLM
        part = {"num_tokens": 3 * BLOCK, "kv_cache_group_id": 0, "block_size": BLOCK}
        vllm.pool.cache_partial_block(before, before.blocks[2], **part)
    assert vllm.cached(later) == [True, True, False]
    assert vllm.word()[1:] == (1, {"before"})
    del vllm.adapter._request_trackers["before"]
    assert vllm.word()[1:] == (1, frozenset())
    vllm.compute(later, 2, 3)
    assert vllm.cached(later) == [True] * 3


def test_unless_all_workers_have_reset_and_after_new_weights_nothing_is_shared_until_a_reset() -> (
    None
):
    vllm, matched = Scheduler(), []
    request = vllm.begin("r", [*range(8)])
    for act, shares in (
        (lambda: None, True),
        (vllm.connector.weights_change, False),
        (vllm.connector.reset_cache, True),
        (lambda: setattr(vllm.adapter.lookup_client, "answer", 0), True),
        (vllm.connector.reset_cache, False),
    ):
        act()
        found = vllm.adapter.get_num_new_matched_tokens(request, 0)
        matched.append((found == BLOCK, vllm.word().distrusted is not None) == (shares, shares))
    assert all(matched)
