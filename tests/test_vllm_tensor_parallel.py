"""Our connector with two tensor-parallel workers in processes of their own: every rank loads its shard, and one look-up answers for all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import PATIENT, eventually
from vllm_cases import CHUNK, Instance, Node, missing, new_tokens, node

from vcache_backend.metadata_server import journal
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.endpoint import beside
from vcache_backend.metadata_server.messages import ChunkKey

WHY_NOT = missing(())
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "vLLM is here"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture(scope="module")
def pair(here: Node) -> Instance:
    workers = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    # Three processes on two cores: an answer may take longer than a server on a node of its own does.
    patient = {"client": {"request_seconds": 5.0}}
    return here.connect("pair", patient, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, **workers)


def test_both_ranks_load_what_both_stored(here: Node, pair: Instance) -> None:
    tokens = new_tokens(4 * CHUNK + 9)
    first = pair.one(tokens)
    # A shard of each chunk from each rank.
    eventually(lambda: here.stats().chunks == 2 * 4)
    expected = pair.one(tokens)
    assert (first.cached, expected.cached) == (0, 4 * CHUNK)
    aside = {"vcache": {"load": False, "store": False}}
    for _ in range(6):
        # So that what comes back is not what still lies in freed blocks.
        pair.again(new_tokens(900), params=aside)
    got = pair.again(tokens)
    assert (got.said, got.cached) == (expected.said, 4 * CHUNK)


def test_a_chunk_of_which_one_shard_is_gone_is_a_miss(here: Node, pair: Instance) -> None:
    known = set(_keys(here))
    tokens = new_tokens(4 * CHUNK + 9)
    expected = pair.one(tokens)
    eventually(lambda: len(_keys(here)) == len(known) + 2 * 4)
    second = [key for key in _keys(here) if key not in known and key.endswith(b"\0\1")]
    with Client(here.socket, PATIENT, reconnect=False) as client:
        assert client.remove(second[2:3]) == 1
    got = pair.again(tokens)
    # Which of the four it was, the journal does not say.
    assert got.agrees(expected)
    assert got.cached in (0, CHUNK, 2 * CHUNK, 3 * CHUNK)


def _keys(here: Node) -> list[ChunkKey]:
    """Of the committed chunks, from the server's journal."""
    return list(journal.read(beside(here.socket, ".journal")).chunks)
