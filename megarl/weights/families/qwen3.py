"""Qwen3: queries and keys normalised per head."""

from megarl.weights.families.blocks import Family, attention, dense_mlp

QWEN3 = Family("qwen3", dense=attention(qk_norm=True) + dense_mlp())
