"""A half of the connector that goes out of use: it is told and released, whatever fails then."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from engine_cases import Node, here
from processes import eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.distributed.kv_transfer", reason="vLLM is not installed")

from vcache_backend.integration.vllm import boundary
from vcache_backend.integration.vllm.boundary import Boundary

__all__ = ["here"]
pytestmark = needs_vllm


def test_a_half_that_fails_while_no_thread_can_be_had_is_released_at_shutdown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    half, released = Boundary("a half", says=True), list[str]()
    half.on_close(lambda: released.append("it"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        half.fail("a reason")
    half.close()
    half.close()
    assert (half.off, released) == ("a reason", ["it"])


def test_a_server_that_comes_later_hears_why_an_instance_caches_nothing(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "AGAIN_SECONDS", 0.01)
    half, released = Boundary("a half", says=True), threading.Event()
    half.config = here.config("host:a")
    half.on_close(released.set)
    half.fail("a reason")
    # By then it has asked for a server in vain.
    eventually(released.is_set)
    here.serve()
    said = "a half caches nothing: a reason"
    operator = here.client()
    eventually(lambda: [each.text for each in operator.stats().reports] == [said])
    half.close()


def test_a_half_is_out_of_use_also_if_the_error_says_nothing() -> None:
    half = Boundary("a half", says=True)
    half.fail("")
    half.close()
    assert half.off
