"""Small random models of every family, and transformers' logits for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB = 131  # odd: tensor parallelism has to pad it
_BASE: dict[str, Any] = {
    "hidden_size": 128,  # heads x head_dim: vLLM does not ask Qwen2 for its head_dim
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
FAMILIES = tuple(_OWN)
MOE_FAMILIES = ("qwen3_moe", "mixtral")


def write_model(family: str, folder: Path, *, seed: int = 0) -> Any:
    """A random fp32 model saved to ``folder`` by transformers; the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_BASE, **_OWN[family]), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: the initial 0 and 1 would hide mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """[T, V] of one sequence."""
    with torch.no_grad():
        return model(torch.as_tensor(ids, dtype=torch.int64)[None]).logits[0].numpy()
