"""The benchmark of real vLLM instances, whole, where vLLM for the CPU is."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_cases import forking, needs_vllm

from benchmarks.results import read

RIGHT = {"inplace_equal", "inplace_flipped_byte_caught", "inplace_pooled_chunks"}
"""Rows that must be right; of the others how fast something is on a CPU is nobody's concern."""


@needs_vllm
@pytest.mark.timeout(600)
def test_the_whole_script_runs_on_the_cpu(tmp_path: Path) -> None:
    """A byte that is flipped in the owner's KV cache is seen."""
    out = tmp_path / "result.json"
    given = ["--scale", "tiny", "--rounds", "1", "--seconds", "540", "--commit", "x"]
    given += ["--only", "equal,flipped,ttft", "--integration", "inplace"]
    # A server without a core for a quarter of a second has not died.
    given += ["--set", "vcache.client.request_seconds=5", "--out", str(out)]
    given += ["--logs", str(tmp_path / "logs"), "--cache", str(tmp_path / "cache")]
    with forking("benchmarks.vllm_ttft", given, tmp_path / "log", {}) as script:
        script.answer(580)
        said = script.log
    assert "; failed: " not in said, said[-6000:]
    found = {row.case: row.ok for row in read(out)}
    assert {case: found[case] for case in RIGHT} == dict.fromkeys(RIGHT, True), said[-6000:]
    assert "inplace_async_ttft_4k" in found
