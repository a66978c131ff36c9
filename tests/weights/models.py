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
}


def numbered_weights(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Every tensor of ``spec``, no number twice and none of them 0, so that nothing can be misplaced unnoticed."""
    weights, start = {}, 1
    for name, shape in spec.hf_tensors().items():
        count = int(np.prod(shape))
        weights[name] = np.arange(start, start + count, dtype=np.int64).reshape(shape)
        start += count
    return weights
