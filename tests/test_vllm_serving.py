"""The benchmark of OpenAI servers, where such a server runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_cases import forking, missing

NEEDED = (
    "uvloop",
    "watchfiles",
    "prometheus-fastapi-instrumentator",
    "model-hosting-container-standards",
)


@pytest.mark.skipif(bool(missing(NEEDED)), reason=missing(NEEDED) or "vLLM is here")
@pytest.mark.timeout(600)
def test_two_servers_answer_on_the_cpu(tmp_path: Path) -> None:
    """vLLM alone in turn: whole answers only, and hits at most as the ceiling has it; how fast is
    nobody's concern.
    """
    arguments = ["--scale", "tiny", "--arms", "alone:turn", "--workloads", "chat"]
    arguments += ["--seconds", "540", "--commit", "x"]
    arguments += ["--out", str(tmp_path / "r.json"), "--logs", str(tmp_path / "logs")]
    arguments += ["--cache", str(tmp_path / "cache")]
    apart: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": None}
    with forking("benchmarks.vllm_serving", arguments, tmp_path / "log", apart) as script:
        assert script.answer(580) == 0, script.log
    found = {row["case"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    errors, hit_rate, own = (
        found[f"vllm_serving_alone_turn_chat_{name}"] for name in ("errors", "hit_rate", "fate_own")
    )
    assert errors["value"] == 0
    assert 0 < hit_rate["value"] <= hit_rate["reference"]
    assert hit_rate["value"] == pytest.approx(own["value"])
