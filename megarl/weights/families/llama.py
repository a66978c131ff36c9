"""Llama (also SmolLM2): the plain decoder."""

from megarl.weights.families.blocks import Family, attention, dense_mlp

LLAMA = Family("llama", dense=attention() + dense_mlp())
