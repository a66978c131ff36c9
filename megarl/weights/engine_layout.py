"""Which rank of a vLLM engine holds which part of which parameter, before vLLM repacks anything for its kernels.

As vLLM 0.32 lays weights out. It differs from Megatron's layout in three ways: query, key and value are three blocks
instead of one block per query group; key/value heads are repeated when there are more ranks than heads; all experts of
a rank are stacked in one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.config import RolloutConfig
from megarl.weights.families.blocks import EMBEDDING, FINAL_NORM, HEAD
from megarl.weights.mappings import ParamMap, ShardSpec, Sizes, Tile, relocated, stacked_rows
from megarl.weights.spec import ModelSpec, layer_prefix

Placement = Literal["linear", "round_robin"]

VOCAB_MULTIPLE = 64
"""vLLM pads embedding and head to a multiple of this."""


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Parallel sizes of one engine; its ranks are its tensor-parallel ranks.

    Example: ``EngineLayout(tp=2)``
    """

    tp: int = 1
    expert_parallel: bool = False
    """Experts spread over the ranks whole, instead of each cut over all ranks."""
    placement: Placement = "linear"
    """Which experts a rank has: a run of neighbours, or every tp-th one. vLLM takes round_robin only for models that
    choose among groups of experts, and linear for all others whatever it is told."""

    def padded_vocab(self, vocab: int) -> int:
        """Rows of embedding and head over all ranks."""
        return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def experts_of(self, experts: int, rank: int) -> range:
        """The experts of which ``rank`` holds a part; with linear placement the first ranks take the remainder."""
        if not self.expert_parallel:
            return range(experts)
        if self.placement == "round_robin":
            return range(rank, experts, self.tp)
        base, rest = divmod(experts, self.tp)
        start = rank * base + min(rank, rest)
        return range(start, start + base + (rank < rest))

    def check(self, spec: ModelSpec) -> None:
        """Refuse sizes that vLLM cannot serve ``spec`` with.

        Raises:
            ValueError: heads, MLP, experts or vocabulary do not divide.
        """
        rules = [
            ("heads", spec.heads),
            ("ffn", spec.ffn if spec.dense_layers else 0),
            ("shared expert ffn", spec.shared_ffn),
            ("expert ffn", 0 if self.expert_parallel else spec.expert_ffn),
            ("padded vocabulary", self.padded_vocab(spec.vocab)),
        ]
        for name, size in rules:
            if size % self.tp:
                raise ValueError(
                    f"{name} ({size}) of the model must be a multiple of the engine's tensor_parallel ({self.tp}); "
                    f"use {math.gcd(size, self.tp)}"
                )
        if spec.latent is None and spec.kv_heads % self.tp and self.tp % spec.kv_heads:
            raise ValueError(
                f"the engine's tensor_parallel ({self.tp}) must divide the number of key/value heads ({spec.kv_heads}) "
                f"or be a multiple of it; use {math.gcd(spec.kv_heads, self.tp)}"
            )
        if self.expert_parallel and spec.experts < self.tp:
            raise ValueError(
                f"expert_parallel must be off for a model of {spec.experts} experts on {self.tp} ranks: "
                "some would hold none; turn it off"
            )
        groups = spec.sigmoid_router.groups if spec.sigmoid_router else 1
        if self.expert_parallel and self.placement == "round_robin" and groups == 1:
            raise ValueError(
                "expert placement (round_robin) must be linear for a model whose experts are not in groups: vLLM takes "
                "linear for it; use linear"
            )


def engine_layout_of(rollout: RolloutConfig) -> EngineLayout:
    """The weight layout that goes with an engine's settings."""
    return EngineLayout(rollout.tensor_parallel, rollout.expert_parallel, rollout.expert_placement)


def engine_params(spec: ModelSpec, layout: EngineLayout, rank: int) -> dict[str, ShardSpec]:
    """Every parameter of ``rank`` by vLLM's name, a tied head not repeated, and what it is made of.

    Raises:
        ValueError: ``layout`` cannot hold ``spec``.
    """
    layout.check(spec)
    assert 0 <= rank < layout.tp, f"rank {rank} of {layout.tp}"
    sizes = spec.sizes(layout.padded_vocab(spec.vocab))
    params = {}
    for param in (EMBEDDING, FINAL_NORM) if spec.tied else (EMBEDDING, FINAL_NORM, HEAD):
        params[param.engine] = param.op.engine_shard(sizes, layout.tp, rank)
    for layer in range(spec.layers):
        for param in spec.params(layer):
            name, shard = layer_prefix(layer) + param.engine, _layer_param(param, sizes, layout, rank, layer)
            params[name] = stacked_rows(params[name], shard) if name in params else shard
    return params


def fp32_params(spec: ModelSpec) -> frozenset[str]:
    """The names of the parameters that vLLM keeps in fp32 whatever the number format of the model."""
    return frozenset(
        layer_prefix(layer) + param.engine
        for layer in range(spec.layers)
        for param in spec.params(layer)
        if param.fp32_in_engine
    )


def _layer_param(param: ParamMap, sizes: Sizes, layout: EngineLayout, rank: int, layer: int) -> ShardSpec:
    prefix = layer_prefix(layer)
    if not param.per_expert:
        return relocated(param.op.engine_shard(sizes, layout.tp, rank), prefix)
    ways, part = (1, 0) if layout.expert_parallel else (layout.tp, rank)
    experts = layout.experts_of(sizes["experts"], rank)
    return _stacked(param.op.engine_shard(sizes, ways, part), experts, prefix)


def _stacked(one: ShardSpec, experts: Sequence[int], prefix: str) -> ShardSpec:
    """The shard [len(experts), rows, cols] of ``one`` for every expert."""
    rows, cols = one.shape
    tiles = tuple(
        Tile(tile.rect.shift(place * rows, 0), tile.hf_name, tile.hf_rect)
        for place, expert in enumerate(experts)
        for tile in relocated(one, prefix, expert).tiles
    )
    return ShardSpec((len(experts), rows, cols), tiles)
