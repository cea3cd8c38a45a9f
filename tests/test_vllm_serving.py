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
@pytest.mark.timeout(900)
def test_two_servers_answer_on_the_cpu(tmp_path: Path) -> None:
    """vLLM alone, whole answers only, and hits at most as the ceiling has it; how fast is nobody's
    concern.
    """
    arguments = [
        "--scale",
        "tiny",
        "--systems",
        "alone",
        "--workloads",
        "prefix",
        "--prefixes",
        "4",
        "--repeats",
        "4",
    ]
    arguments += ["--seconds", "840", "--commit", "x"]
    arguments += [
        "--out",
        str(tmp_path / "r.json"),
        "--logs",
        str(tmp_path / "logs"),
        "--cache",
        str(tmp_path / "cache"),
    ]
    apart: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": None}
    with forking("benchmarks.vllm_serving", arguments, tmp_path / "log", apart) as script:
        assert script.answer(880) == 0, script.log
    found = {row["case"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert found["vllm_serving_alone_prefix_errors"]["value"] == 0
    hit = found["vllm_serving_alone_prefix_hit_rate"]
    assert 0 < hit["value"] <= hit["reference"]
    assert hit["value"] == pytest.approx(found["vllm_serving_alone_prefix_hit_rate_own"]["value"])
