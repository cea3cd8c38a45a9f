"""Real vLLM on the CPU: a decode server loads a prompt that a prefill server has computed to its
last token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import vllm_cases
from vllm_cases import BLOCK, CHUNK, IN_PLACE, QUICK, Node, keep, new_tokens

pytestmark = vllm_cases.needs_vllm
PROMPT = 4 * CHUNK


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """`a` computes prompts, `b` answers."""
    with vllm_cases.node(tmp_path_factory.mktemp("vllm"), QUICK) as made:
        made.a = made.connect("a", IN_PLACE, role="kv_producer")
        made.b = made.connect("b", IN_PLACE, role="kv_consumer")
        made.aside = made.alone("aside")
        for instance in (made.a, made.b):
            instance.one(new_tokens(5))
        yield made


def answers(here: Node, tokens: list[int], cached: int) -> None:
    """`b` loads so many tokens, and says what an instance of its own would. What no load fills is
    poisoned."""
    here.b.forget()
    here.b.ask("poison")
    answer = here.b.one(tokens)
    assert answer.cached == cached
    assert answer.agrees(here.aside.one(tokens))


@pytest.mark.parametrize("behind", [0, 1, 2, BLOCK - 1])
def test_a_prompt_is_loaded_to_its_last_token(here: Node, behind: int) -> None:
    """However many tokens lie behind its last whole block."""
    tokens = new_tokens(PROMPT + behind)
    keep(here.a, tokens, max_tokens=1)
    answers(here, tokens, PROMPT + behind - 1)


def test_only_the_same_tokens_are_loaded(here: Node) -> None:
    """Another last token makes no difference, since it is computed; one before it does."""
    tokens = new_tokens(PROMPT + 9)
    keep(here.a, tokens, max_tokens=1)
    answers(here, [*tokens[:-1], tokens[-1] ^ 1], PROMPT + 8)
    answers(here, [*tokens[:-2], tokens[-2] ^ 1, tokens[-1]], PROMPT)
    answers(here, tokens[:-1], PROMPT)


def test_a_prompt_whose_answer_is_computed_there_is_loaded_in_blocks(here: Node) -> None:
    """The blocks of the answer can be read as ever."""
    tokens = new_tokens(PROMPT + 9)
    longer = [*tokens, *keep(here.a, tokens, max_tokens=2 * BLOCK).tokens]
    answers(here, tokens, PROMPT)
    answers(here, longer, PROMPT + 2 * BLOCK)


def test_the_last_block_is_not_the_next_one_that_is_used_again(here: Node) -> None:
    """vLLM hands blocks without a hash out first."""
    tokens = new_tokens(PROMPT + 9)
    keep(here.a, tokens, max_tokens=1)
    keep(here.a, new_tokens(PROMPT), max_tokens=1)
    answers(here, tokens, PROMPT + 8)
