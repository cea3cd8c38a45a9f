"""Real vLLM on the CPU with our connector and LMCache's server mode side by side: `lmcache server` as
its users start it, two instances, and `aside`, vLLM alone, whose answers are right.

A hit of ours ends with a block of 32 tokens, one of LMCache's with a chunk of 64, so the number of
cached tokens tells who has loaded."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import vllm_cases
import yaml
from processes import ROOT, SECONDS, Worker, eventually
from vllm_cases import (
    ANSWER_SECONDS,
    BLOCK,
    CHUNK,
    IN_PLACE,
    SMALL,
    Answer,
    Instance,
    Node,
    Prompt,
    meddled,
    new_tokens,
    quick,
)

pytest.importorskip("vllm.distributed.kv_transfer", reason="vLLM is not installed")


from benchmarks.processes import free_ports

__all__ = ["quick"]
pytestmark = [
    vllm_cases.needs_vllm,
    pytest.mark.skipif(bool(vllm_cases.missing()), reason="no LMCache"),
]
LENGTH = 3 * CHUNK
"""Of prompts: ours finds a block more than LMCache."""
TOKENS = LENGTH + BLOCK + 5
MEMORY_GB = 16 / 1024
"""LMCache's: room for some hundred chunks."""
THEIRS = "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector"

_MEMORY = "lmcache.v1.multiprocess.transfer_context.shm:EngineDrivenContextShm"
FOUND, FREED = f"{_MEMORY}._build_slot_tensors", f"{_MEMORY}.commit_retrieve"
"""Before and behind the copy of a load of LMCache's."""


class Beside:
    """`lmcache server`, and instances with both connectors."""

    def __init__(self, here: Node) -> None:
        self.here = here
        self.port, self.http = free_ports(2)
        # A server that is killed leaves it.
        memory = Path(f"/dev/shm/lmcache_l1_pool_{self.port}")
        here.undo.callback(memory.unlink, missing_ok=True)
        self.serve()

    def serve(self) -> None:
        told = f"server --host 127.0.0.1 --port {self.port} --http-port {self.http} --chunk-size {CHUNK}"
        told += f" --l1-size-gb {MEMORY_GB} --no-l1-use-lazy --shm-name {self.port}"
        told += " --eviction-policy LRU --supported-transfer-mode engine_driven"
        told += " --worker-reap-timeout-seconds 0 --disable-observability"
        log = self.here.folder / f"lmcache-{self.port}.log"
        self.server = Worker(vllm_cases.home(), object, name="lmcache", log=log)
        self.here.undo.enter_context(self.server)
        self.server.tell(_lmcache, told.split())
        eventually(lambda: "startup complete" in self.server.log, ANSWER_SECONDS)

    def start(self, name: str, role: str = "kv_both", **arguments: Any) -> Instance:
        """With the file that the page names, at the test's ports."""
        given = yaml.safe_load((ROOT / "configs" / "vllm-lmcache.yaml").read_text())
        given = given["kv-transfer-config"]
        ours, theirs = given["kv_connector_extra_config"]["connectors"]
        ours |= self.here.transfer(IN_PLACE)
        # Nobody takes a slow server for a dead one but who is told to look: `noticed`.
        changes = {"port": self.port, "mq_timeout": SECONDS, "heartbeat_interval": 10 * SECONDS}
        theirs["kv_connector_extra_config"] |= {
            f"lmcache.mp.{key}": changes[key] for key in changes
        }
        theirs["kv_role"] = role
        made = self.here.alone(name, kv_transfer_config=given, **arguments)
        made.in_place = True
        return made


def _lmcache(_: object, arguments: list[str]) -> None:
    import sys

    from lmcache.cli.main import main

    sys.argv = ["lmcache", *arguments]
    main()


@pytest.fixture(scope="module")
def beside(quick: Node) -> Beside:
    made = Beside(quick)
    quick.a, quick.b = made.start("a", **SMALL), made.start("b", **SMALL)
    quick.aside = quick.alone("aside")
    return made


def forget(*instances: Instance) -> None:
    """Empty the KV caches, once LMCache has reported what it stores: blocks are free only then."""
    for one in instances:
        eventually(lambda one=one: (one.step(1), one.ask("forget"))[1])


def computed(instance: Instance, tokens: list[int]) -> Answer:
    """An answer that the others can use."""
    answer = instance.one(tokens)
    assert instance.ask("told")
    return answer


def noticed(alive: bool, *instances: Instance) -> None:
    """Have the instances notice whether LMCache's server is there."""
    seconds = SECONDS if alive else 0.5
    for one in instances:
        eventually(lambda one=one: one.ask("finds_lmcache", seconds) == [alive, alive])


def test_the_longest_hit_counts_whoever_has_it(beside: Beside, quick: Node) -> None:
    a, b, tokens = quick.a, quick.b, new_tokens(TOKENS)
    right = quick.aside.one(tokens)
    computed(b, tokens[: CHUNK + 5])
    found = [computed(a, tokens)]
    # In place b has the prompt's beginning only, and LMCache has more.
    forget(a)
    found.append(computed(a, tokens))
    forget(a, b)
    found.append(b.one(tokens))
    # A reset reaches both.
    assert eventually(lambda: (b.step(1), b.ask("reset"))[1])
    forget(a)
    found.append(b.one(tokens))
    assert [one.cached for one in found] == [CHUNK, LENGTH, LENGTH, 0]
    assert all(one.agrees(right) for one in found)
    assert all("SHM pinned=" in one.log for one in (a, b)), "KV was pickled"


def test_one_that_dies_leaves_the_other(beside: Beside, quick: Node) -> None:
    a, b, tokens = quick.a, quick.b, new_tokens(TOKENS)
    right = quick.aside.one(tokens)
    computed(a, tokens)
    quick.kill()
    forget(a, b)
    answers = [b.one(tokens)]
    quick.serve_again(stores=False)
    beside.server.kill()
    noticed(False, a, b)
    forget(a, b)
    answers += [computed(a, tokens), b.one(tokens)]
    beside.serve()
    noticed(True, a, b)
    for _ in range(2):
        forget(a, b)
        answers.append(b.one(tokens))
    assert [one.cached for one in answers] == [LENGTH, 0, LENGTH + BLOCK, 0, LENGTH]
    assert all(one.agrees(right) for one in answers)


def test_a_load_of_lmcaches_holds_up_no_step(beside: Beside, quick: Node) -> None:
    """Nor does its look-up cost one, and it waits for none. And nothing is written to blocks that
    are somebody else's, once its server is gone."""
    a, tokens, other = quick.a, new_tokens(TOKENS), new_tokens(BLOCK)
    right = quick.aside.run(Prompt(tokens), Prompt(other))
    a.ask("patience", SECONDS, SECONDS)
    computed(a, tokens)
    forget(a)
    with vllm_cases.stopped_at(a, FOUND) as held:
        a.add("loads", tokens)
        a.step(1)
        eventually(lambda: held.reached)
        a.add("other", other)
        found = a.finish("other")
        held.go()
        found |= a.finish("loads")
    a.ask("patience", SECONDS)
    assert not a.ask("lmcache_waits")
    assert found["loads"].cached == LENGTH
    assert all(found[name].agrees(own) for name, own in zip(("loads", "other"), right, strict=True))
    forget(a)
    with vllm_cases.stopped_at(a, FOUND) as held:
        a.add("lost", tokens)
        eventually(lambda: (a.step(1), held.reached)[1])
        beside.server.kill()
        noticed(False, a, quick.b)
        lost = a.finish("lost")["lost"]
        assert (lost.cached, lost.agrees(right[0])) == (0, True)
        forget(a)
        a.ask("poison")
        a.ask("meddle", FREED, "count", None, vllm_cases.FOREVER)
        held.go()
        eventually(lambda: a.ask("calls")[FREED])
        assert a.ask("written") == 0
    beside.serve()
    noticed(True, a, quick.b)


def test_vllm_hears_of_a_load_of_lmcaches_before_its_worker_reports_it(
    beside: Beside, quick: Node
) -> None:
    """Once: the late report is no other load's."""
    b, tokens = quick.b, new_tokens(TOKENS)
    right = quick.aside.one(tokens)
    computed(quick.a, tokens)
    forget(quick.a, b)
    b.ask("hush_lmcache", True)
    early = b.one(tokens)
    b.ask("hush_lmcache", False)
    forget(b)
    answers = [early, b.one(tokens)]
    assert [one.cached for one in answers] == [LENGTH, LENGTH]
    assert all(one.agrees(right) for one in answers)
    forget(b)


@pytest.mark.parametrize("fault", ["raises", "says nothing"])
def test_a_request_loads_again_once_its_last_load_was_reported(
    beside: Beside, quick: Node, fault: str
) -> None:
    """vLLM has heard of a load, LMCache's worker does not report it, and the request is preempted.
    If the worker raises, LMCache's scheduler goes on to find the hit, and each load fails."""
    b, tokens = beside.start(fault.replace(" ", "_")), new_tokens(TOKENS)
    right = quick.aside.one(tokens, max_tokens=20)
    computed(quick.a, tokens)
    forget(quick.a)
    b.ask("report_within", 1.0)
    with vllm_cases.stopped_at(b, FOUND) as held:
        b.add("again", tokens, max_tokens=20)
        eventually(lambda: (b.step(1), held.reached)[1])
        b.ask("meddle", FREED, "count", None, vllm_cases.FOREVER)
        held.go()
        eventually(lambda: b.ask("calls")[FREED])
    if fault == "raises":
        b.ask("meddle", f"{THEIRS}.get_transfer_results", "raise", None, vllm_cases.FOREVER)
        said = "LMCacheMPConnector is out of use"
    else:
        b.ask("hush_lmcache", True)
        said = "a load that is over was not reported within 2 s"
    b.step(3)
    assert b.ask("preempts") == {"RUNNING": "PREEMPTED"}
    assert b.finish("again")["again"].agrees(right)
    assert said in b.log
    b.close()


def test_whoever_does_not_answer_or_raises_leaves_the_other(beside: Beside, quick: Node) -> None:
    """A whole hit is not held up by a hung server. What might be longer there is waited for, but
    not for ever."""
    one, two, three, four = (new_tokens(TOKENS) for _ in range(4))
    right = [quick.aside.one(tokens) for tokens in (one, two, three, three, four, four)]
    # What LMCache stores in its server waits for the server, within a step.
    a, b = beside.start("one", "kv_consumer"), beside.start("two")
    computed(quick.a, one)
    forget(a, b)
    with beside.server.stopped():
        a.ask("hurry_lmcache", 2.0)
        found = [a.one(one)]
        a.ask("patience", 0.1)
        found.append(a.one(two))
    assert "waited 0 s for the look-up of LMCacheMPConnector" in a.log
    noticed(True, quick.a, b)
    with meddled(a, f"{THEIRS}.get_num_new_matched_tokens", "raise", times=1):
        found.append(a.one(three))
    forget(a)
    computed(quick.a, three)
    forget(quick.a)
    with meddled(b, f"{vllm_cases.OURS}.lookups:Lookups.find", "raise", times=1):
        found.append(b.one(three))
    assert b.ask("lmcache_waits"), "what we stored is not known any more"
    computed(quick.a, four)
    found += [a.one(four), b.one(four)]
    hits = LENGTH + BLOCK, 0, 0, LENGTH, LENGTH + BLOCK, LENGTH
    assert tuple(one.cached for one in found) == hits
    assert all(one.agrees(own) for one, own in zip(found, right, strict=True))
    for instance in (a, b):
        forget(instance)
        instance.close()


def test_an_aborted_load_is_reported_once(beside: Beside, quick: Node) -> None:
    """LMCache says at once that the request's blocks are free, though our load still fills them. At
    both reports vLLM would end."""
    a, b, tokens = quick.a, quick.b, new_tokens(TOKENS)
    right = computed(a, tokens)
    with meddled(b, vllm_cases.PULL, "slow", 60.0):
        b.add("aborted", tokens)
        eventually(lambda: (b.step(1), not b.ask("forget"))[1])
        b.ask("abort", "aborted")
        b.step(3)
        assert not b.ask("forget")
    forget(b)
    answer = b.one(tokens)
    assert (answer.cached, answer.agrees(right)) == (LENGTH + BLOCK, True)
    forget(b)


def test_what_our_load_did_not_fill_comes_from_the_other(beside: Beside, quick: Node) -> None:
    """And LMCache stores nothing out of blocks that were not filled."""
    a, b, tokens = quick.a, quick.b, new_tokens(TOKENS)
    right = computed(a, tokens)
    with vllm_cases.stopped_at(b, vllm_cases.COMPARE) as there:
        found = there.while_there(lambda: forget(a), Prompt(tokens))
    forget(b)
    found.append(b.one(tokens))
    assert [one.cached for one in found] == [LENGTH, LENGTH]
    assert all(one.agrees(right) for one in found)
    forget(b)


def test_every_answer_is_right_when_everything_is_full(beside: Beside, quick: Node) -> None:
    """Requests are preempted, KV caches and LMCache's memory evict, requests are aborted."""
    choice, roots = Random(60), [new_tokens(5 * CHUNK) for _ in range(6)]
    both = quick.a, quick.b

    def preempted() -> float:
        return sum(one.counter("vllm:num_preemptions") for one in both)

    # It depends on times whether a request is.
    for turn in range(28):
        if turn > 6 and preempted():
            break
        batch = [
            Prompt([*choice.choice(roots)[: choice.randrange(BLOCK, 5 * CHUNK)], 3 + turn], count)
            for count in (4, 40, 60)
        ]
        one = both[turn % 2]
        one.add(f"aborted {turn}", choice.choice(roots))
        one.step(choice.randrange(4))
        one.ask("abort", f"aborted {turn}")
        answers = one.run(*batch, together=True)
        for answer, right in zip(answers, quick.aside.run(*batch, together=True), strict=True):
            assert answer.agrees(right)
        if turn % 4 == 3:
            forget(one)
    assert preempted()
    assert all(one.counter("vllm:external_prefix_cache_hits") > 0 for one in both)
    forget(*both)


def test_reports_that_nobody_expects_reach_nobody(quick: Node) -> None:
    talker = {"kv_connector": "TalkingConnector", "kv_connector_module_path": "vllm_variants"}
    inside = {"connectors": [quick.transfer(IN_PLACE), talker | {"kv_role": "kv_both"}]}
    given = {"kv_connector": "VCacheMultiConnector", "kv_role": "kv_both"}
    one = quick.alone("talked to", kv_transfer_config=given | {"kv_connector_extra_config": inside})
    tokens = new_tokens(TOKENS)
    right = computed(quick.a, tokens)
    assert [one.one(tokens).cached, one.one(new_tokens(TOKENS)).cached] == [LENGTH + BLOCK, 0]
    forget(one)
    assert one.one(tokens).agrees(right)
    one.close()
