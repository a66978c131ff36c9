"""Qwen2 and Qwen2.5: biases on query, key and value; small models tie embedding and head."""

from megarl.weights.families.blocks import Family, attention, dense_mlp

QWEN2 = Family("qwen2", dense=attention(qkv_bias=True) + dense_mlp())
