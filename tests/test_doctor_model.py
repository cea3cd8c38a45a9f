"""`vcache doctor --model` and `vcache plan`: what a model's own file tells before vLLM starts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_doctor import config, only

from vcache_backend.config import Config
from vcache_backend.doctor import diagnose
from vcache_backend.doctor.plan import plan

__all__ = ["config"]

LLAMA = {
    "architectures": ["L"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MLA = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
FALCON = {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71}
DBRX = {"n_layers": 40, "d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8}}
MIMO = {
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, *[1] * 4, *[0, *[1] * 5] * 7, 0],
}
MIXED = ["sliding_attention", "full_attention"] * 16


def written(folder: Path, model: object) -> str:
    """A model's folder, with its own file."""
    (folder / "config.json").write_text(json.dumps(model))
    return str(folder)


@pytest.mark.parametrize(
    ("model", "token", "said"),
    [
        (LLAMA | {"torch_dtype": "bfloat16"}, 131072, "32 layers of full attention: cached; 8 KV heads of 128, bfloat16"),
        (LLAMA | {"head_dim": 64, "dtype": "float32"}, 65536, "16 bits (float32 in the file)"),
        (LLAMA | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 65536, "8 KV heads of 128, fp8"),
        # As Falcon 7B, Falcon 40B and DBRX are published.
        (
            FALCON | {"multi_query": True, "num_kv_heads": 71},
            8192,
            "32 layers of full attention: cached; 1 KV head of 64, bfloat16",
        ),
        (FALCON | {"multi_query": True, "new_decoder_architecture": True, "n_head_kv": 8}, 65536, "8 KV heads of 64"),
        (DBRX, 163840, "40 layers of full attention: cached; 8 KV heads of 128"),
        # Half a byte a number, and a scale of one byte to 16 of them.
        (LLAMA | {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, 36864, "8 KV heads of 128, nvfp4"),
        (LLAMA | {"sliding_window": 4096, "use_sliding_window": False}, 131072, "32 layers of full attention: cached"),
        ({"text_config": MLA, "architectures": ["V"]}, 70272, "(V): 61 layers of full attention: cached; one row of 576 numbers"),
        (LLAMA | {"layer_types": ["chunked_attention"] * 24 + ["full_attention"] * 8}, 131072, "32 layers of full attention"),
        (
            LLAMA | {"layer_types": MIXED, "sliding_window": 128},
            98304,
            "16 layers of full attention, 16 layers with a window of 128 tokens: cached",
        ),
        # Of tables of 6 layers one lacks two, whose places are nobody's.
        (
            LLAMA | {"num_hidden_layers": 34, "model_type": "gemma3_text", "sliding_window": 1024},
            4096 * 35,
            "29 layers with a window",
        ),
        (LLAMA | {"sliding_window": 4096}, 131072, "32 layers with a window of 4,096 tokens: cached"),
        (
            LLAMA | {"mamba_d_state": 128, "layer_types": ["mamba", "attention"] * 16},
            65536,
            "16 layers of full attention, 16 layers with a state: cached",
        ),
        (
            LLAMA | {"linear_num_value_heads": 32, "full_attention_interval": 4},
            32768,
            "8 layers of full attention, 24 layers with a state: cached",
        ),
        # Falcon-H1: each layer has both. Kimi-Linear, Jamba, Bamba, MiniMax: the file has which layers look at all tokens, in its own way.
        (
            LLAMA | {"mamba_d_state": 256, "model_type": "falcon_h1"},
            131072,
            "32 layers of full attention, 32 layers with a state: cached",
        ),
        (
            MLA | {"num_hidden_layers": 27, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}},
            8064,
            "7 layers of full attention, 20 layers with a state: cached; one row of 576 numbers",
        ),
        (
            LLAMA | {"mamba_d_state": 16, "attn_layer_period": 8, "attn_layer_offset": 4},
            16384,
            "4 layers of full attention, 28 layers with a state: cached",
        ),
        (LLAMA | {"mamba_d_state": 16, "attn_layer_indices": [9, 18, 27]}, 12288, "3 layers of full attention, 29"),
        (LLAMA | {"attn_type_list": [0, 0, 0, 1] * 8}, 32768, "8 layers of full attention, 24 layers with a state: cached"),
        (
            LLAMA | {"mamba_d_state": 64, "attention_head_dim": 224, "layers_block_type": ["mamba", "hybrid"] * 16},
            16 * 2 * 8 * 224 * 2,
            "16 layers of full attention, 32 layers with a state: cached",
        ),
        (
            LLAMA | {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 8},
            32768,
            "8 layers of full attention, 8 layers with",
        ),
        # MiMo V2: K and V of a head differ in size, and windows have more heads. A chunk of 256 tokens has the last 128 of a window.
        (MIMO, (9 * 4 * 256 + 5 * 9 * 8 * 128) * 320 * 2 // 256, "9 layers of full attention, 39 layers with a window of 128"),
        # Step 3.5: layers that guess ahead stand behind the others. Nemotron-NAS: some layers attend to nothing.
        (
            LLAMA | {"num_key_value_heads": None, "num_attention_groups": 4, "layer_types": [*["full_attention"] * 32, "x"]},
            65536,
            "32 layers of full attention: cached; 4 KV heads of 128",
        ),
        (
            LLAMA | {"block_configs": [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}}] * 16},
            65536,
            "16 layers of full attention: cached; 8 KV heads of 128",
        ),
        (LLAMA | {"block_configs": [{"attention": {"n_heads_in_group": n}} for n in (4, 8)] * 16}, 0, "pages of several sizes"),
        (LLAMA | {"layer_group_size": 8}, 16384, "4 layers of full attention, 28 layers with a state: cached"),
        (
            LLAMA | {"sliding_window": 4096, "sliding_window_pattern": "LLLG"},
            131072,
            "8 layers of full attention, 24 layers with",
        ),
        ({"model_type": "longcat_flash", "num_layers": 28} | MLA, 64512, "56 layers of full attention: cached; one row"),
        (
            {"layers_block_type": ["attention"] * 4, "num_attention_heads": 8, "head_dim": 128},
            16384,
            "4 layers of full attention",
        ),
        (
            {"is_encoder_decoder": True, "num_hidden_layers": 12, "d_model": 768},
            0,
            "an encoder's output depends on the whole input",
        ),
        ({"num_hidden_layers": 64, "state_size": 128}, 0, "nothing of it is cached: all layers keep a state"),
        (MLA | {"index_head_dim": 128}, 0, "pages of several sizes"),
    ],
)
def test_a_models_own_file_tells_whether_it_is_cached_and_what_a_token_takes(
    config: Config, tmp_path: Path, model: dict[str, object], token: int, said: str
) -> None:
    first, *more = diagnose(config, written(tmp_path, model))
    assert said in first.detail
    if not token:
        assert (first.status, bool(first.advice), more) == ("fail", True, [])
        return
    chunks, pool = more
    assert chunks.detail.startswith(f"{token:,} B a token, ")
    if "full_attention_interval" in model:
        assert "also has a state, as large as 3 chunks of one block" in chunks.detail
    assert ("half of that" in chunks.advice) == ("state" not in first.detail and "fp" not in first.detail)
    assert f"1 GiB of pool holds {(1 << 30) // (256 * token):,} chunks, " in pool.detail
    assert (first.status, chunks.status, pool.status) == ("ok", "ok", "ok")


@pytest.mark.parametrize(
    ("algorithm", "token", "said"),
    [("FP8", 65536, "fp8"), ("NVFP4", 36864, "nvfp4"), ("INT8", 131072, "bfloat16"), (None, 131072, "bf")],
)
def test_modelopts_own_file_tells_what_the_kv_cache_is_quantized_to_where_the_models_does_not(
    config: Config, tmp_path: Path, algorithm: str | None, token: int, said: str
) -> None:
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": algorithm}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    first, chunks, _ = diagnose(config, written(tmp_path, LLAMA))
    assert f"8 KV heads of 128, {said}" in first.detail
    assert chunks.detail.startswith(f"{token:,} B a token, ")
    # vLLM looks at it only where the model's own file says nothing.
    said_itself = LLAMA | {"quantization_config": {"quant_method": "fp8"}}
    assert "8 KV heads of 128, bfloat16" in diagnose(config, written(tmp_path, said_itself))[0].detail
    (tmp_path / "hf_quant_config.json").write_text("[]")
    assert "hf_quant_config.json cannot be read: it holds a list" in diagnose(config, written(tmp_path, LLAMA))[0].detail


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no config.json in"),
        ("[]", "it holds a list"),
        ("{", "cannot be read"),
        ('{"num_hidden_layers": 2, "model_type": "nobody knows"}', "has no num_key_value_heads"),
        (json.dumps(LLAMA | {"mamba_d_state": 128}), "does not say which layers keep a state"),
        ("[" * 100_000, "cannot be read"),
        (json.dumps(LLAMA | {"architectures": 7}), "TypeError"),
        (json.dumps(LLAMA | {"quantization_config": "x"}), "AttributeError"),
        (json.dumps(LLAMA | {"sliding_window": True}), "a window of 1 tokens"),
        (json.dumps(LLAMA | {"head_dim": math.inf}), "OverflowError"),
        (json.dumps(LLAMA | {"hybrid_override_pattern": "-"}), "no layers"),
        (json.dumps(LLAMA | {"num_hidden_layers": 10**30}), "B a token"),
        (json.dumps(MLA | {"kv_lora_rank": 1.5}), "65.5 numbers"),
    ],
)
def test_what_cannot_be_told_of_a_model_is_said_with_what_would_help(
    config: Config, tmp_path: Path, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    finding = only(diagnose(config, str(tmp_path)))
    assert (finding.status, said in finding.detail, bool(finding.advice)) == ("warn", True, True), finding
    assert only(plan(str(tmp_path), config, gpus=1)).status == "fail"


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-this-name/model", "/no/such/model", "./model", "a/b/c"])
def test_a_name_of_nothing_is_a_finding_and_only_a_name_of_the_hub_is_to_be_downloaded(config: Config, name: str) -> None:
    finding = only(diagnose(config, name))
    download, folder = f"`hf download {name} config.json`, or name its folder", "name the folder with its config.json"
    assert (finding.status, finding.advice.partition(", or its")[0]) == ("warn", download if name[0] == "x" else folder)


def test_where_nobody_may_look_is_a_finding_and_no_bug_of_ours(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a folder of others' is to a user; here a name that no file can have, since root may look everywhere."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    finding = only(diagnose(config, "x" * 300))
    assert (finding.status, finding.advice) == ("warn", "name a folder that this user may read")
    assert finding.detail.endswith("config.json cannot be looked at: File name too long")


def test_a_file_of_no_model_is_not_read(config: Config, tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "1,099,511,627,776 B" in only(diagnose(config, str(tmp_path))).detail


def test_a_models_file_says_nothing_to_the_terminal(config: Config, tmp_path: Path) -> None:
    told = LLAMA | {"architectures": ["\x1b[2J" + "x" * 1000], "dtype": "\x1b[1m"}
    detail = diagnose(config, written(tmp_path, told))[0].detail
    assert "(\\x1b[2Jxxx" in detail
    assert len(detail) < 300 + len(str(tmp_path))
    assert detail.isprintable()


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_a_models_own_code_never_runs(tmp_path: Path) -> None:
    """Not even where somebody says yes to all that is asked."""
    written(tmp_path, {"model_type": "ours", "auto_map": {"AutoConfig": "ours.Ours"}})
    (tmp_path / "ours.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Ours: pass\n")
    command = [sys.executable, "-m", "vcache_backend.cli", "doctor", "--model", str(tmp_path)]
    ran = subprocess.run(command, input=b"y\n" * 9, capture_output=True, timeout=60, check=False)
    assert b"has no num_hidden_layers" in b" ".join(ran.stdout.split()), ran
    assert not (tmp_path / "ran").exists()


def test_a_model_is_looked_for_in_hugging_faces_cache_and_nowhere_else(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    finding = only(diagnose(config, "org/name"))
    assert (finding.status, finding.advice.startswith("`hf download org/name config.json`")) == ("warn", True)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("c0ffee")
    written(snapshot, LLAMA)
    assert diagnose(config, "org/name")[0].status == "ok"


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_what_a_models_file_leaves_out_transformers_says(config: Config, tmp_path: Path) -> None:
    assert "32 KV heads of 128" in diagnose(config, written(tmp_path, {"model_type": "llama", "num_hidden_layers": 2}))[0].detail


def test_a_plan_says_what_gpus_lend_and_what_is_left_of_them(config: Config, tmp_path: Path) -> None:
    _, _, pool, vllm = plan(written(tmp_path, LLAMA), config, gpus=8, tokens=500_000, gpu_bytes=80 << 30)
    # 1,954 chunks of 32 MiB, 245 on each but one.
    assert (pool.advice, pool.detail) == (
        "pool.segment_bytes: 8 GiB",
        "8 GPUs that lend 8 GiB each hold 2,048 chunks, 524,288 tokens",
    )
    assert (vllm.status, vllm.advice) == ("ok", "--gpu-memory-utilization 0.85")
    *_, vllm = plan(str(tmp_path), config, gpus=1, tokens=500_000, gpu_bytes=80 << 30)
    assert (vllm.status, vllm.advice.startswith("lend less")) == ("warn", True)
    *_, pool = plan(str(tmp_path), config, gpus=2)
    assert pool.detail.startswith("2 GPUs that lend 1 MiB each hold 0 chunks")
    assert only(plan(written(tmp_path, LLAMA | {"mamba_d_state": 128}), config, gpus=8)).status == "fail"
