"""`vcache doctor --model`: what the vLLM that is installed here says of a model,
before it serves it.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_doctor import config, only
from vllm_cases import beside_vllm, doctor_report, needs_vllm

from vcache_backend import prove
from vcache_backend.config import Config
from vcache_backend.doctor import THERE, Finding, check_model, diagnose
from vcache_backend.errors import VCacheError

__all__ = ["config"]

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPE |= {"intermediate_size": 128, "vocab_size": 128, "max_position_embeddings": 4096}
SHAPE |= {"torch_dtype": "bfloat16"}
LLAMA = SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
LLAMA |= {"num_hidden_layers": 4}
GEMMA = SHAPE | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
GEMMA |= {"num_hidden_layers": 6, "sliding_window": 64}
GRANITE = SHAPE | {"model_type": "granitemoehybrid", "num_hidden_layers": 4}
GRANITE |= {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0}
GRANITE |= {"layer_types": ["mamba", "mamba", "mamba", "attention"], "shared_intermediate_size": 64}
GRANITE |= {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 128, "mamba_n_groups": 1}
TOKEN = 4 * 2 * 2 * 16 * 2
"""Bytes of a token of `LLAMA`: layers, K and V, KV heads, numbers of a head, bytes of a number."""


def written(folder: Path, model: object) -> Path:
    """A model's folder, with its own file and no weights."""
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def diagnosed(_: object, model: str) -> list[Finding]:
    """Where vLLM is imported: the doctor's child is a fork of that process."""
    from forked_programs import Popen

    subprocess.Popen = Popen  # type: ignore[misc]
    return list(diagnose(Config(), model))


@needs_vllm
def test_vllm_says_what_a_model_keeps_and_a_pool_holds(tmp_path: Path) -> None:
    with beside_vllm() as worker:
        model, chunks, pool = worker.ask(diagnosed, str(written(tmp_path, LLAMA)))
    layers = "LlamaForCausalLM: 4 layers of full attention"
    assert f"{layers}: shared in place, hits end at multiples of 128 tokens" in model.detail
    assert chunks.detail.startswith(f"{TOKEN:,} B a token in bfloat16, ")
    holds = f"{(1 << 30) // TOKEN:,} tokens; pool.segment_bytes: 8 GiB holds {(8 << 30) // TOKEN:,}"
    assert (pool.status, holds in pool.detail) == ("ok", True)


@needs_vllm
def test_layers_with_windows_are_shared_in_place_and_a_chunk_has_what_a_hit_can_need(
    tmp_path: Path,
) -> None:
    model = doctor_report(written(tmp_path, GEMMA), Config())
    layers = "5 layers with a window of 64 tokens, 1 layers of full attention"
    assert model.text == f"Gemma3ForCausalLM: {layers}"
    # Of the full layer's 256 tokens all, of a window's the last block of 128, in each of five
    # tables.
    assert model.settings.connector.share == "in_place"
    assert model.chunk_bytes == (256 + 5 * 128) * TOKEN // 4


@needs_vllm
def test_blocks_are_as_large_as_a_state_like_in_an_instance(tmp_path: Path) -> None:
    model = doctor_report(written(tmp_path, GRANITE), Config())
    # A state takes more bytes than vLLM's 128 tokens of KV on a CPU.
    assert model.layers == {("state", 0, 640): 3, ("full", 0, 640): 1}
    assert (model.hits, model.settings.engine.chunk_size % 640, model.refused) == (640, 0, "")
    assert model.settings.connector.share == "in_place"


def asked(_: object, model: str) -> bytes:
    """What the doctor's child process prints."""
    from vcache_backend.integration.vllm.model import report

    read, write = os.pipe()
    os.dup2(write, 1)
    sys.argv[1:], sys.stdin = [model], io.StringIO("{}")
    report.main()
    return os.read(read, 1 << 16)


@needs_vllm
def test_a_models_own_code_never_runs(tmp_path: Path) -> None:
    written(tmp_path, {"model_type": "ours", "auto_map": {"AutoConfig": "ours.Ours"}})
    (tmp_path / "ours.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Ours: pass\n")
    with beside_vllm() as worker:
        (finding,) = json.loads(worker.ask(asked, str(tmp_path)))
    assert finding["status"] == "fail"
    assert "trust_remote_code" in finding["detail"]
    assert not (tmp_path / "ran").exists()


@needs_vllm
def test_vllm_that_does_not_answer_is_no_fault_of_the_doctor(tmp_path: Path) -> None:
    (finding,) = check_model(Config(), str(written(tmp_path, LLAMA)), seconds=0.01)
    assert (finding.status, finding.advice) == ("fail", "start vLLM with it and see its log")
    assert "vLLM could not be asked" in finding.detail


@pytest.mark.parametrize("path", ["{}/llama", "./llama", "../llama", "~/llama"])
def test_a_path_that_is_not_there_is_named_before_vllm_is_asked(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would take it for a name of Hugging Face, and say so after a minute. It does not expand
    `~`."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    path = path.format(tmp_path)
    said = f"{os.path.abspath(path)}: No such file or directory"
    (finding,) = check_model(Config(), path)
    assert (finding.status, said in finding.detail, finding.advice) == ("fail", True, THERE)
    with pytest.raises(VCacheError, match=f"{said}; {THERE}"):
        prove.run(prove.Settings(path), print)


def test_a_folder_that_is_no_model_is_named_before_vllm_is_asked(tmp_path: Path) -> None:
    with pytest.raises(VCacheError, match=f"no model at {tmp_path}: the folder has no config.json"):
        prove.run(prove.Settings(str(tmp_path)), print)


def test_without_vllm_nobody_guesses(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = "vcache_backend.doctor.find_spec"
    monkeypatch.setattr(lacking, lambda name: None if name == "vllm" else find_spec(name))
    finding = only(diagnose(config, str(written(tmp_path, LLAMA))))
    assert (finding.status, finding.advice) == ("fail", "run this in vLLM's environment")
