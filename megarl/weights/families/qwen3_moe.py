"""Qwen3-MoE: Qwen3's attention, every MLP a mixture of experts."""

from megarl.weights.families.blocks import Family, attention, moe

QWEN3_MOE = Family(
    "qwen3_moe", moe=attention(qk_norm=True) + moe("mlp", gate="gate_proj", up="up_proj", down="down_proj")
)
