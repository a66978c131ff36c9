"""Precision recipes: names to Megatron-Core settings. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one recipe is asked of Megatron-Core and Transformer Engine."""

    bf16: bool
    """False computes in fp32."""
    needs_transformer_engine: bool = False
    megatron: dict[str, object] = field(default_factory=dict)
    """Further fields of TransformerConfig."""


RECIPES = {
    "fp32": Recipe(bf16=False),
    "bf16": Recipe(bf16=True),
    "delayed": Recipe(True, True, {"fp8": "hybrid", "fp8_recipe": "delayed"}),
    "tensorwise": Recipe(True, True, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "blockwise": Recipe(True, True, {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
    "mxfp8": Recipe(True, True, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
}
