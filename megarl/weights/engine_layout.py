"""Which rank of a vLLM engine holds which part of which parameter, before vLLM repacks anything for its kernels.

As vLLM 0.32 lays weights out. It differs from Megatron's layout in three ways: query, key and value are three blocks
instead of one block per query group; key/value heads are repeated when there are more ranks than heads; all experts of
a rank are stacked in one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.weights.families.blocks import EMBEDDING, FINAL_NORM, HEAD
from megarl.weights.mappings import QKV, ParamMap, Rect, ShardSpec, Sizes, Tile, exact_share, relocated, view_2d
from megarl.weights.spec import ModelSpec, layer_prefix

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

    def padded_vocab(self, vocab: int) -> int:
        """Rows of embedding and head over all ranks."""
        return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def experts_of(self, experts: int, rank: int) -> range:
        """The experts of which ``rank`` holds a part: vLLM's linear placement, the first ranks taking the remainder."""
        if not self.expert_parallel:
            return range(experts)
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
            ("ffn", 0 if spec.experts else spec.ffn),
            ("expert ffn", 0 if self.expert_parallel else spec.expert_ffn),
            ("padded vocabulary", self.padded_vocab(spec.vocab)),
        ]
        for name, size in rules:
            if size % self.tp:
                raise ValueError(
                    f"{name} ({size}) of the model must be a multiple of the engine's tensor_parallel ({self.tp}); "
                    f"use {math.gcd(size, self.tp)}"
                )
        if spec.kv_heads % self.tp and self.tp % spec.kv_heads:
            raise ValueError(
                f"the engine's tensor_parallel ({self.tp}) must divide the number of key/value heads ({spec.kv_heads}) "
                f"or be a multiple of it; use {math.gcd(spec.kv_heads, self.tp)}"
            )
        if self.expert_parallel and spec.experts < self.tp:
            raise ValueError(
                f"expert_parallel must be off for a model of {spec.experts} experts on {self.tp} ranks: "
                "some would hold none; turn it off"
            )


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
        params[param.engine] = param.op.shard(sizes, layout.tp, rank)
    for layer in range(spec.layers):
        for param in spec.params:
            prefix = layer_prefix(layer)
            params[prefix + param.engine] = _layer_param(param, sizes, layout, rank, prefix)
    return params


def _layer_param(param: ParamMap, sizes: Sizes, layout: EngineLayout, rank: int, prefix: str) -> ShardSpec:
    if param.per_expert:
        ways, part = (1, 0) if layout.expert_parallel else (layout.tp, rank)
        return _stacked(param.op.shard(sizes, ways, part), layout.experts_of(sizes["experts"], rank), prefix)
    if isinstance(param.op, QKV):
        return relocated(_blocked_qkv(param.op, sizes, layout.tp, rank), prefix)
    return relocated(param.op.shard(sizes, layout.tp, rank), prefix)


def _blocked_qkv(op: QKV, sizes: Sizes, ways: int, rank: int) -> ShardSpec:
    """The rank's query heads above its key heads above its value heads. Ranks that outnumber these share them."""
    shape = op.q.shape(sizes)
    cols = view_2d(shape).col1
    query_rows = exact_share(sizes["q"], ways)
    kv_ways = min(ways, sizes["kv_heads"])
    kv_rows = exact_share(sizes["kv"], kv_ways)
    kv_part = rank // exact_share(ways, kv_ways)
    tiles, top = [], 0
    for tensor, rows, part in ((op.q, query_rows, rank), (op.k, kv_rows, kv_part), (op.v, kv_rows, kv_part)):
        source = Rect(part * rows, (part + 1) * rows, 0, cols)
        tiles.append(Tile(source.shift(top - source.row0, 0), tensor.name, source))
        top += rows
    return ShardSpec((top, *shape[1:]), tuple(tiles))


def _stacked(one: ShardSpec, experts: Sequence[int], prefix: str) -> ShardSpec:
    """The shard [len(experts), rows, cols] of ``one`` for every expert."""
    rows, cols = one.shape
    tiles = tuple(
        Tile(tile.rect.shift(place * rows, 0), tile.hf_name, tile.hf_rect)
        for place, expert in enumerate(experts)
        for tile in relocated(one, prefix, expert).tiles
    )
    return ShardSpec((len(experts), rows, cols), tiles)
