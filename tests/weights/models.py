"""Small models of every family, as config.json has them, and arrays in which every element is another number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megarl.weights.spec import ModelSpec

_BASE: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "vocab_size": 75,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_SHIPPED = Path(__file__).parents[2] / "configs/models"
QWEN3_30B_A3B: dict[str, Any] = json.loads((_SHIPPED / "Qwen3-30B-A3B/config.json").read_text())
"""The published model, as the eight-GPU config names it."""

_MOE = {"num_experts_per_tok": 2, "norm_topk_prob": True}
_GLM = {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.5,
}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "q_lora_rank": 16,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 2,
    "qk_nope_head_dim": 4,
    "v_head_dim": 3,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE | {"model_type": "llama"},
    "qwen2-tied": _BASE | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2": _BASE | {"model_type": "qwen2", "num_key_value_heads": 4},
    "qwen3": _BASE | {"model_type": "qwen3", "num_key_value_heads": 8},
    "qwen3_moe": _BASE | _MOE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 8},
    "qwen3_moe-tied": _BASE
    | _MOE
    | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8, "tie_word_embeddings": True},
    "mixtral": _BASE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _BASE | _MOE | _GLM | {"use_qk_norm": True},
    "glm4_moe-air": _BASE | _MOE | _GLM | {"first_k_dense_replace": 2, "n_shared_experts": 2},
    "deepseek_v3": _BASE | _DEEPSEEK,
}


def numbered_weights(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Every tensor of ``spec``, no number twice and none of them 0, so that nothing can be misplaced unnoticed."""
    weights, start = {}, 1
    for name, shape in spec.hf_tensors().items():
        count = int(np.prod(shape))
        weights[name] = np.arange(start, start + count, dtype=np.int64).reshape(shape)
        start += count
    return weights
