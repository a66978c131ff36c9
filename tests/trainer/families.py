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
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
        "num_mtp_layers": 0,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 64,  # what transformers' rotary embedding has, of the rotated part
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "q_lora_rank": 48,
        "kv_lora_rank": 512,  # with the 64 rotated dimensions the one size that vLLM's CPU kernel knows
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_mtp_layers": 0,
    },
}
FAMILIES = tuple(_OWN)
MOE_FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")


def write_model(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> Any:
    """A random fp32 model saved to ``folder`` by transformers; the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **(_BASE | _OWN[family] | changes)), dtype=torch.float32
    )
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for tensor in (*model.parameters(), *biases):  # norms too: the initial 0 and 1 would hide mistakes
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return model


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """[T, V] of one sequence."""
    with torch.no_grad():
        return model(torch.as_tensor(ids, dtype=torch.int64)[None]).logits[0].numpy()
