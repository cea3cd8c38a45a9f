"""The end of a load, which vLLM hears of before the report of the step that saw it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_place_cases import Engine, make
from pool_cases import CHUNKS, abort, engine, here, pooled
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from vcache_backend.integration.vllm.ends import SIZE, AwaitedLoads, EndRing, LoadEnds
from vcache_backend.integration.vllm.metadata import LoadSpec, WorkerReport

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm


SAYS_NOTHING: dict[str, Any] = {"invalid_block_ids": set()}


def ends(engine: Engine, request_id: str = "r") -> None:
    """The worker writes, while the next steps run, that the request's load has succeeded."""

    def ran(output: Any) -> None:
        meta = output.kv_connector_metadata
        if numbers := [load.number for load in meta.loads if load.request_id == request_id]:
            ring = EndRing(0)
            ring.open(meta.ends)
            ring.put(*numbers)

    engine.ran = ran


def test_a_load_whose_end_is_reported_and_written_at_once_counts_once(engine: Engine) -> None:
    """So the report of the next load of that request counts, too."""
    ends(engine)
    tokens = pooled(engine)
    for _ in range(2):
        request = engine.add(tokens, name="r")
        engine.step(finished_recving={"r"})
        engine.step(**SAYS_NOTHING)
        assert request.num_output_tokens == 1
        engine.finish(request)
        engine.ran = lambda _: None
        engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("seen", [True, False])
def test_the_report_of_what_was_aborted_is_not_its_successors(engine: Engine, seen: bool) -> None:
    """seen: vLLM knew of the load's end before the abort, so it has freed the blocks."""
    ends(engine)
    tokens = pooled(engine)
    engine.add(tokens, name="r")
    if seen:
        engine.step(**SAYS_NOTHING)
    else:
        write = engine.ran
        engine.ran = lambda output: (write(output), abort(engine))
        engine.step(**SAYS_NOTHING)
    abort(engine)
    assert not engine.scheduler.requests
    engine.ran = lambda _: None
    request = engine.add(tokens, name="r")
    meta = engine.step(finished_recving={"r"})
    assert (len(meta.loads), meta.cancelled) == (1, set())
    engine.step(**SAYS_NOTHING)
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step(finished_recving={"r"})
    engine.finish(request)


def test_a_preempted_request_that_loads_again_waits_for_its_second_load(engine: Engine) -> None:
    """The report of the first one comes late, as from a pipeline of several stages."""
    ends(engine)
    request = engine.add(pooled(engine), name="r")
    for _ in range(2):
        engine.step(**SAYS_NOTHING)
    assert request.num_output_tokens == 1
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.ran = lambda _: None
    assert len(engine.step(finished_recving={"r"}).loads) == 1
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step(**SAYS_NOTHING)
    assert request.num_output_tokens == 1
    ends(engine)
    engine.ran(SimpleNamespace(kv_connector_metadata=engine.metas[-2]))
    engine.step(**SAYS_NOTHING)
    engine.step(finished_recving={"r"})
    assert request.num_output_tokens == 2
    engine.finish(request)


def test_a_load_that_ends_beside_one_that_fails_is_not_touched_by_that(engine: Engine) -> None:
    """The blocks of the failed one come with the same output."""
    ends(engine)
    right = engine.add(pooled(engine), name="r")
    wrong = engine.add(pooled(engine), name="wrong")
    engine.step(**SAYS_NOTHING)
    (blocks,) = (load.blocks for load in engine.metas[-1].loads if load.request_id == "wrong")
    said = {"invalid_block_ids": set(blocks), "finished_recving": {"r", "wrong"}}
    engine.step(kv_connector_worker_meta=WorkerReport(failed={"wrong"}), **said)
    assert (right.num_output_tokens, wrong.num_output_tokens) == (1, 0)
    engine.finish(wrong)
    engine.finish(right)
    again = [chunk for meta in engine.metas for chunk in engine.stored(wrong, meta)]
    assert again == [*range(CHUNKS)], "what is computed in place of a load is stored"


def test_a_load_is_over_once_all_workers_say_so() -> None:
    """And a number that another worker's load has overwritten says nothing."""
    ends, rings = LoadEnds(2), [EndRing(worker) for worker in range(2)]
    for ring in rings:
        ring.open(ends.address)
    awaited, output = AwaitedLoads(), KVConnectorOutput()
    awaited.sent([LoadSpec(name, number=at) for at, name in enumerate("xy", 1)])
    rings[0].put(1)
    assert not ends.in_all(1)
    rings[1].put(1 + SIZE)
    assert not ends.in_all(1)
    rings[1].put(1)
    awaited.tell(output, ends.in_all)
    assert output.finished_recving == {"x"}
    later = KVConnectorOutput(finished_recving={"x", "y"})
    awaited.settle(later)
    assert later.finished_recving == {"y"}
    ends.close()


def test_a_worker_writes_into_nothing_but_its_schedulers_memory(tmp_path: Path) -> None:
    """On another host the path may be that of any file of this user. Nobody can take the memory
    from under the scheduler."""
    ends, ring = LoadEnds(1), EndRing(0)
    path, link = ends.address
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(path, 0)
    with (tmp_path / "other").open("wb+") as other:
        other.write(bytes(SIZE * 8))
        other.flush()
        for wrong in (f"/proc/{os.getpid()}/fd/{other.fileno()}", "/proc/0/fd/0", ""):
            ring.open((wrong, f"{link}{wrong}" if wrong else ""))
            ring.put(7)
        assert not any((tmp_path / "other").read_bytes())
    assert not ends.in_all(7)
    ring.open(ends.address)
    ring.put(7)
    assert ends.in_all(7)
    ends.close()
