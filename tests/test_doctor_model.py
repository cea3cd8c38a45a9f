"""`vcache doctor --model`: what the vLLM that is installed here says of a model,
before it serves it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_doctor import config, only
from vllm_cases import missing

from vcache_backend.config import Config
from vcache_backend.doctor import diagnose

__all__ = ["config"]

needs_vllm = pytest.mark.skipif(bool(missing(())), reason=missing(()) or "vLLM is here")
SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
LLAMA = SHAPE | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
}
GEMMA = SHAPE | {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "sliding_window": 64,
}
MAMBA = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "state_size": 16,
    "num_heads": 8,
    "head_dim": 16,
    "n_groups": 1,
    "vocab_size": 128,
}
TOKEN = 4 * 2 * 2 * 16 * 2
"""Bytes of a token of `LLAMA`: layers, K and V, KV heads, numbers of a head, bytes of a number."""


def written(folder: Path, model: object) -> str:
    """A model's folder, with its own file and no weights."""
    (folder / "config.json").write_text(json.dumps(model))
    return str(folder)


@needs_vllm
def test_vllm_says_what_a_model_keeps_and_a_pool_holds(tmp_path: Path) -> None:
    model, chunks, pool = diagnose(Config(), written(tmp_path, LLAMA))
    assert "LlamaForCausalLM: 4 layers of full attention: shared in place" in model.detail
    assert chunks.detail.startswith(f"{TOKEN:,} B a token in bfloat16, ")
    held = (1 << 30) // TOKEN
    assert pool.detail == (
        f"1 GiB of pool holds {held:,} tokens; "
        f"pool.segment_bytes: 8 GiB holds {8 * held:,} a worker and rank"
    )


@needs_vllm
def test_layers_with_windows_go_through_a_pool_and_a_chunk_holds_what_a_hit_can_need(
    config: Config, tmp_path: Path
) -> None:
    first, chunks, pool = diagnose(config, written(tmp_path, GEMMA))
    assert (
        "5 layers with a window of 64 tokens, 1 layers of full attention: shared through a pool"
        in first.detail
    )
    # Of the full layer's 256 tokens all, of a window's the last block of 128, in each of five
    # tables.
    chunk = (256 + 5 * 128) * TOKEN // 4
    assert chunks.detail.startswith(f"{chunk // 256:,} B a token")
    assert f"1 GiB of pool holds {(1 << 30) // chunk * 256:,} tokens; " in pool.detail


@needs_vllm
def test_a_model_that_is_not_cached_is_a_failure_that_says_why(
    config: Config, tmp_path: Path
) -> None:
    finding = only(diagnose(config, written(tmp_path, MAMBA)))
    assert finding.status == "fail"
    assert "Mamba2ForCausalLM: 2 layers with a state: nothing of it is cached: " in finding.detail


@needs_vllm
def test_a_models_own_code_never_runs(tmp_path: Path) -> None:
    """Not even where somebody says yes to all that is asked."""
    written(tmp_path, {"model_type": "ours", "auto_map": {"AutoConfig": "ours.Ours"}})
    (tmp_path / "ours.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Ours: pass\n")
    command = [
        sys.executable,
        "-m",
        "vcache_backend.cli",
        "doctor",
        "--json",
        "--model",
        str(tmp_path),
    ]
    ran = subprocess.run(command, input=b"y\n" * 9, capture_output=True, timeout=300, check=False)
    assert (ran.returncode, b"trust_remote_code" in ran.stdout) == (1, True), ran
    assert not (tmp_path / "ran").exists()


def test_without_vllm_nobody_guesses(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vcache_backend.doctor.model.find_spec",
        lambda name: None if name == "vllm" else find_spec(name),
    )
    finding = only(diagnose(config, written(tmp_path, LLAMA)))
    assert (finding.status, finding.advice) == ("fail", "run this in vLLM's environment")
