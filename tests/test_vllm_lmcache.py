"""Real vLLM with LMCacheConnectorV1 and vcache on the CPU: what only LMCache has.
`test_integrations.py` has the rest.

Instance `a` stores; `b` has never computed what it is asked; `other` has other chunks.
"""

from __future__ import annotations

import pytest
from vllm_cases import CHUNK, Instance, Node, here, missing, new_tokens

__all__ = ["here"]
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "vLLM is here"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def a(here: Node) -> Instance:
    return here.start("a")


@pytest.fixture(scope="module")
def b(here: Node, a: Instance) -> Instance:
    return here.start("b")


def test_a_tag_keeps_requests_apart_and_a_forged_one_opens_nothing(
    here: Node, a: Instance, b: Instance
) -> None:
    """That of a salt is ours to make. One that LMCache could not hash is not cached at all."""
    from vcache_backend.integration.lmcache.scope import TAG, scope

    tokens = new_tokens(2 * CHUNK + 1)
    here.keep(a, tokens, salt="red")
    forged = {TAG: scope("red", None)}
    assert b.again(tokens, params=forged).cached == 0
    assert b.again(tokens, params=forged, salt="blue").cached == 0
    tokens = new_tokens(2 * CHUNK + 1)
    here.keep(a, tokens, params={"lmcache.tag.team": "red"})
    assert b.again(tokens).cached == 0
    assert b.again(tokens, params={"lmcache.tag.team": "blue"}).cached == 0
    assert b.again(tokens, params={"lmcache.tag.team": "red"}).cached == 2 * CHUNK
    tokens, before = new_tokens(2 * CHUNK + 1), here.chunks()
    answer = a.one(tokens, params={"lmcache.tag.team": ["red"]})
    here.keep(a, new_tokens(CHUNK))
    assert here.chunks() == before + 1
    assert b.one(tokens).agrees(answer)


def test_without_a_hash_seed_it_steps_aside_and_says_so_once(here: Node, a: Instance) -> None:
    """Two instances would never agree on a key."""
    aside = here.start("aside", environment={"PYTHONHASHSEED": None})
    tokens, before = new_tokens(2 * CHUNK + 1), here.chunks()
    alone = aside.one(tokens)
    assert aside.again(tokens).cached == 0
    assert here.chunks() == before
    assert a.one(tokens).said == alone.said
    # LMCache says the reason, too.
    (line,) = [line for line in aside.log.splitlines() if "vLLM serves, nothing is cached" in line]
    assert "stepped aside: PYTHONHASHSEED is not set" in line
