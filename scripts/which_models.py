"""Asks the vLLM that is installed here which of its text generation models are cached, and how.

python scripts/which_models.py run FILE      asks vLLM, for some minutes; FILE gets the answers
python scripts/which_models.py write FILE    replaces the table in docs/vllm/models.md

For each architecture in vLLM's registry vLLM makes the model without weights, from the defaults of
its configuration in transformers or vLLM, and its KV cache specifications and block tables. Our
connector decides as at the start of an instance (`integration.vllm.model.report`). An architecture
whose configuration has no usable defaults is counted as not asked."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "vllm" / "models.md"
BEGIN, END = (
    "<!-- python scripts/which_models.py write docs/vllm/models.json -->\n",
    "<!-- end -->\n",
)
SECONDS = 240
"""How long one architecture may take."""
HOW = {
    "in place": "in place, and through a pool",
    "pool": "through a pool",
    "refused": "refused",
    "not asked": "not asked",
}
SHAPES = PAGE.parents[2] / "benchmarks" / "vllm" / "models.json"
"""Configurations of some models, with fewer layers."""
LACKING: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True, "route_scale": 1.0},
    "DeepseekV32ForCausalLM": {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
    "DeepseekV4ForCausalLM": {
        "hidden_size": 4096,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "vocab_size": 129280,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "num_hash_layers": 3,
        "compress_rope_theta": 160000,
        "compress_ratios": [0, 0, 4, 128, 4, 128],
    },
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1},
    "LongcatFlashForCausalLM": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "MiMoV2FlashForCausalLM": {"hybrid_layer_pattern": [0, 1] * 24},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64},
}
"""What vLLM reads and a configuration has no default for."""
KINDS = {"Llama4ForCausalLM": "llama4_text"}
_FITTING = re.compile(r"set chunk_size: (\d+)")


def run(file: Path) -> None:
    """Ask about each architecture in a process of its own, forked once vLLM is imported."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import vllm
    from vllm.model_executor.models import registry

    from vcache_backend.integration.vllm.model import report  # noqa: F401 - children need it

    # By itself vLLM looks at each model's class in another new process, for ten seconds.
    registry._run_in_subprocess = lambda look: look()
    asked = {}
    for name in registry._TEXT_GENERATION_MODELS:
        asked[name] = _in_child(name)
        print(name, asked[name], file=sys.stderr, flush=True)
        told = {"vllm": vllm.__version__, "architectures": asked}
        file.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


def _in_child(name: str) -> dict[str, str]:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        signal.alarm(SECONDS)
        try:
            answer = _ask(name)
        except Exception as error:  # noqa: BLE001 - whatever vLLM says of a model is its answer
            said = str(error).strip().splitlines() or [""]
            answer = {"how": "not asked", "why": f"{type(error).__name__}: {said[0]:.160}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        told = answers.read()
    os.waitpid(pid, 0)
    late = {"how": "not asked", "why": f"no answer within {SECONDS} s"}
    return json.loads(told) if told else late


def _ask(name: str) -> dict[str, str]:
    import torch

    from vcache_backend.config import from_dict
    from vcache_backend.integration.vllm.model import report

    report.EngineArgs = _as_on_a_gpu
    if not torch.cuda.is_available():
        # Some models make these before they know their device.
        nothing = type("Nothing", (), {"__init__": lambda self, *given, **named: None})
        torch.cuda.Event = torch.cuda.Stream = nothing
    with tempfile.TemporaryDirectory() as folder:
        config = _defaults(name)
        Path(folder, "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        found = report.report(folder, from_dict({}))
        # Another chunk size is a setting, and no refusal.
        fitting = _FITTING.search(found.refused)
        if fitting:
            size = {"engine": {"chunk_size": int(fitting[1])}}
            found = report.report(folder, from_dict(size))
    layers = " + ".join(f"{layer.kind}{layer.window or ''}" for layer in found.layers)
    if found.refused:
        return {"how": "refused", "why": found.refused, "layers": layers}
    return {"how": "in place" if found.in_place else "pool", "layers": layers}


def _as_on_a_gpu(**given: Any) -> Any:
    """vLLM's arguments. On a CPU vLLM has no prefix cache for MLA."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(**given, enable_prefix_caching=True)
    create = arguments.create_engine_config

    def created() -> Any:
        made = create()
        made.cache_config.enable_prefix_caching = True
        return made

    arguments.create_engine_config = created
    return arguments


def _defaults(name: str) -> dict[str, Any]:
    """The default configuration of an architecture. LookupError if neither vLLM nor transformers
    has one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for shape in json.loads(SHAPES.read_text()).values():
        if shape.get("architectures") == [name]:
            return dict(shape)
    kinds = [KINDS[name]] if name in KINDS else []
    kinds += [
        kind
        for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if name in (names if isinstance(names, tuple) else (names,))
    ]
    plain = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
    known = [*CONFIG_MAPPING, *_CONFIG_REGISTRY]
    kinds += [kind for kind in known if kind.replace("_", "").replace("-", "") == plain]
    for kind in kinds:
        made = _CONFIG_REGISTRY[kind] if kind in _CONFIG_REGISTRY else CONFIG_MAPPING[kind]
        defaults: dict[str, Any] = json.loads(made().to_json_string(use_diff=False))
        return (
            {"torch_dtype": "bfloat16"} | defaults | {"dtype": "bfloat16"} | LACKING.get(name, {})
        )
    raise LookupError("neither vLLM nor transformers has a configuration for it")


def table(told: Mapping[str, Any]) -> str:
    """The page's table: how many architectures are cached in which way, and the names."""
    named: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, answer in told["architectures"].items():
        why = answer.get("why", "") if answer["how"] == "refused" else ""
        why = why.rpartition("and its group: ")[2].partition(": no setting")[0]
        named[answer["how"], why].append(_short(name))
    count = len(told["architectures"])
    lines = [
        f"vLLM {told['vllm']} has {count} architectures that generate text, without those of",
        "images and sound. Each with the defaults of its configuration:",
        "",
        "| | architectures | |",
        "| --- | --- | --- |",
    ]
    for how, words in HOW.items():
        for (which, why), names in sorted(named.items()):
            if which == how:
                text = f"{words}: {why}" if why else words
                lines.append(f"| {text} | {len(names)} | {', '.join(sorted(names))} |")
    return "".join(f"{line}\n" for line in lines)


def _short(name: str) -> str:
    return name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")


def main(arguments: list[str]) -> int:
    """See the module's text."""
    if len(arguments) != 2 or arguments[0] not in ("run", "write"):
        print(__doc__)
        return 2
    file = Path(arguments[1])
    if arguments[0] == "run":
        run(file)
        return 0
    before, rest = PAGE.read_text().split(BEGIN)
    made = table(json.loads(file.read_text()))
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.split(END, 1)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
