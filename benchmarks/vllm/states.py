"""Shapes of models whose layers keep states, not tokens: Mamba-2, short convolutions, gated delta
nets; few layers, real widths.
"""

from __future__ import annotations

from typing import Any

EAGER: dict[str, Any] = {
    "arguments": {"enforce_eager": True},
    "environment": {"VLLM_TRITON_FORCE_FIRST_CONFIG": "1"},
}
"""How instances of them start."""
GRAPHS: dict[str, Any] = EAGER | {
    "arguments": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
}
"""Or with CUDA graphs of their decode steps, and nothing compiled: what vLLM 0.33 compiles wants a
newer torch than GPU hosts have.
"""
_USUAL: dict[str, Any] = {
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}
"""Of any shape, on the CPU."""

GRANITE = _USUAL | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.125,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "rms_norm_eps": 1e-5,
}
"""Granite 4 H, without experts."""
LFM2 = _USUAL | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "layer_types": ["conv", "conv", "full_attention", "conv"] * 4,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "block_dim": 2048,
    "block_ff_dim": 8192,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-5,
}
QWEN3_NEXT = _USUAL | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}
TINY_GRANITE = TINY | {
    "shared_intermediate_size": 256,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mamba_n_heads": 8,
    "num_key_value_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
}
TINY_LFM2 = TINY | {
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_dim": 256,
    "block_dim": 256,
    "block_ff_dim": 256,
}
TINY_QWEN3_NEXT = TINY | {
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]),
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
