"""Mixtral: Llama's attention, every MLP a mixture of experts; w1 is the gate, w3 up, w2 down."""

from megarl.weights.families.blocks import Family, attention, moe

MIXTRAL = Family("mixtral", moe=attention() + moe("block_sparse_moe", gate="w1", up="w3", down="w2"))
