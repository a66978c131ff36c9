"""Which rank of a Megatron-Core job holds which part of which parameter.

Ranks are ordered tp-cp-ep-dp-pp, tp fastest. Every rank has two coordinates, since experts are laid out on a grid of
their own over the same ranks, with the same pipeline stages:

    dense   rank = tp  + TP  * (cp + CP * (dp  + DP  * pp))
    expert  rank = etp + ETP * (ep + EP * (edp + EDP * pp))

Layers are numbered from 0 within a stage. With interleaved pipelines (vpp > 1) a rank holds vpp model chunks, chunk c
of all of them in execution order sitting on stage ``c % PP``; parameter names then start with ``model{vp}.``.
A stage's layers are the even share, or what the first or last stage's own numbers leave, or what a custom layout says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from megarl.weights.families.blocks import EMBEDDING, FINAL_NORM, HEAD
from megarl.weights.mappings import ParamMap, ShardSpec, Sizes, relocated
from megarl.weights.spec import ModelSpec, layer_prefix

Names = Literal["local", "te"]
"""Parameter names of Megatron-Core's local layer spec with SequentialMLP, or Transformer Engine's with TEGroupedMLP."""


@dataclass(frozen=True, slots=True)
class DenseCoordinate:
    """Where a rank stands for everything but experts."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ExpertCoordinate:
    """Where a rank stands for experts."""

    etp: int
    ep: int
    edp: int
    pp: int


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Parallel sizes of the trainer.

    Raises:
        ValueError: the sizes do not divide ``world_size``.

    Example: ``MegatronLayout(tp=2, pp=1, ep=2, etp=1, world_size=2)``
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    world_size: int = 1
    vpp: int = 1
    cp: int = 1
    vocab_multiple: int = 1
    """Megatron's make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this times tp. Megatron's
    default is 128, for speed; 1 pads no more than the cut needs."""
    first_stage_layers: int | None = None
    """Layers of the first stage when it differs from the others (num_layers_in_first_pipeline_stage)."""
    last_stage_layers: int | None = None
    """The same for the last stage."""
    pipeline_layout: str = ""
    """Megatron's pipeline_model_parallel_layout: what every chunk holds, in execution order, separated by ``|``: E the
    embedding, t a layer, L the loss; ``t*3`` is ``ttt`` and ``(tt|)*2`` is ``tt|tt|``, commas mean nothing."""

    def __post_init__(self) -> None:
        for key, size in (
            ("tp * pp * cp", self.tp * self.pp * self.cp),
            ("etp * ep * pp", self.etp * self.ep * self.pp),
        ):
            if self.world_size % size:
                raise ValueError(
                    f"world_size ({self.world_size}) must be a multiple of {key} ({size}); use a multiple of {size}"
                )
        ends = (self.first_stage_layers, self.last_stage_layers)
        if self.pp == 1 and ends != (None, None):
            raise ValueError(f"first_stage_layers and last_stage_layers {ends} must be None when pp is 1; use pp >= 2")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp ({self.vpp}) must be 1 without pipeline parallelism (pp is 1); use vpp 1 or pp >= 2")
        if self.pipeline_layout:
            self._check_pipeline_layout(ends)

    def _check_pipeline_layout(self, ends: tuple[int | None, int | None]) -> None:
        chunks = _chunks_of(self.pipeline_layout)
        text = "".join(chunks)
        rules = [
            (ends != (None, None), "must not be given together with first_stage_layers or last_stage_layers"),
            (set(text) - set("EtL") != set(), "must consist of E, t, L and |"),
            (not re.fullmatch("Et*L", text), "must start with the one E and end with the one L"),
            (
                len(chunks) != self.pp * self.vpp,
                f"must have pp x vpp ({self.pp * self.vpp}) parts separated by |, and has {len(chunks)}",
            ),
        ]
        for broken, rule in rules:
            if broken:
                example = "|".join(["E" + "t" * 2, *["t" * 2] * (self.pp * self.vpp - 1)]) + "L"
                raise ValueError(f"pipeline_layout ({self.pipeline_layout}) {rule}; use one such as {example}")

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense parameters."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def dense(self, rank: int) -> DenseCoordinate:
        """The dense coordinate of ``rank``."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return DenseCoordinate(tp, cp, dp, pp)

    def expert(self, rank: int) -> ExpertCoordinate:
        """The expert coordinate of ``rank``."""
        rest, etp = divmod(rank, self.etp)
        rest, ep = divmod(rest, self.ep)
        pp, edp = divmod(rest, self.edp)
        return ExpertCoordinate(etp, ep, edp, pp)

    def padded_vocab(self, vocab: int) -> int:
        """Rows of embedding and output head over all tensor-parallel ranks."""
        step = self.vocab_multiple * self.tp
        return -(-vocab // step) * step

    def stage_layers(self, layers: int, pp: int, vp: int = 0) -> range:
        """Global numbers, from 0, of the layers in chunk ``vp`` of stage ``pp`` of a model of ``layers`` layers."""
        counts = self._layers_per_chunk(layers)
        number = vp * self.pp + pp
        start = sum(counts[:number])
        return range(start, start + counts[number])

    def _layers_per_chunk(self, layers: int) -> list[int]:
        """Layers of every chunk, in execution order."""
        if not self.pipeline_layout:
            return [count // self.vpp for count in self._layers_per_stage(layers)] * self.vpp
        counts = [chunk.count("t") for chunk in _chunks_of(self.pipeline_layout)]
        if sum(counts) != layers:
            raise ValueError(
                f"pipeline_layout ({self.pipeline_layout}) must place all {layers} layers of the model, and places "
                f"{sum(counts)}; write as many t"
            )
        return counts

    def _layers_per_stage(self, layers: int) -> list[int]:
        """Layers of every stage, all its chunks together, without a custom layout."""
        first = [] if self.first_stage_layers is None else [self.first_stage_layers]
        last = [] if self.last_stage_layers is None else [self.last_stage_layers]
        stages = self.pp - len(first) - len(last)
        left = layers - sum(first) - sum(last)
        if left < 0 or (left % stages if stages else left):
            raise ValueError(
                f"{left} of {layers} layers, without those of a first or last stage with an own number {first + last}, "
                f"must spread evenly over {stages} of pp ({self.pp}) stages; use another pp or set first_stage_layers"
            )
        counts = first + [left // stages for _ in range(stages)] + last
        if any(count % self.vpp for count in counts):
            raise ValueError(
                f"layers of every stage {counts} must be a multiple of vpp ({self.vpp}); use a vpp that divides them"
            )
        return counts

    def check(self, spec: ModelSpec) -> None:
        """Refuse sizes that cannot hold ``spec``.

        Raises:
            ValueError: heads, MLP, experts or layers do not divide.
        """
        self._layers_per_chunk(spec.layers)
        rules = [
            ("heads", spec.heads, "tp", self.tp),
            ("ffn", spec.ffn if spec.dense_layers else 0, "tp", self.tp),
            ("shared expert ffn", spec.shared_ffn, "tp", self.tp),
            ("experts", spec.experts, "ep", self.ep),
            ("expert ffn", spec.expert_ffn, "etp", self.etp),
        ]
        for name, size, key, ways in rules:
            if size % ways:
                raise ValueError(
                    f"{name} ({size}) of the model must be a multiple of {key} ({ways}); use {math.gcd(size, ways)}"
                )
        if spec.latent is None and spec.kv_heads % self.tp and self.tp % spec.kv_heads:
            raise ValueError(
                f"tp ({self.tp}) must divide the number of key/value heads ({spec.kv_heads}) or be a multiple of it; "
                f"use tp {math.gcd(spec.kv_heads, self.tp)}"
            )
        if not spec.experts and (self.ep > 1 or self.etp not in (1, self.tp)):
            raise ValueError(
                f"ep ({self.ep}) and etp ({self.etp}) must be 1 for a {spec.family} model: it has no experts; use 1"
            )


def layout_from(sizes: Sequence[str]) -> MegatronLayout:
    """A layout from texts such as ``tp=2``; ``world_size`` is the smallest that fits unless it is given.

    Raises:
        ValueError: a size that does not exist, is no number or does not fit the others.
    """
    names = [one.name for one in fields(MegatronLayout)]
    values: dict[str, Any] = {}
    for text in sizes:
        name, sign, value = text.partition("=")
        if not sign or name not in names:
            raise ValueError(f"size ({text}) must be one of {', '.join(names)} with a value; use one such as tp=2")
        if name != "pipeline_layout" and not (value.isdecimal() and (int(value) > 0 or name.endswith("_layers"))):
            raise ValueError(f"{name} ({value}) must be a whole number from 1 on; use {name}=1")
        values[name] = value if name == "pipeline_layout" else int(value)
    size = {name: values.get(name, 1) for name in ("tp", "pp", "cp", "ep", "etp")}
    smallest = math.lcm(size["tp"] * size["pp"] * size["cp"], size["etp"] * size["ep"] * size["pp"])
    return MegatronLayout(**{"world_size": smallest, **values})


def _chunks_of(pipeline_layout: str) -> list[str]:
    """A custom pipeline layout, written out and cut into its chunks."""
    text = pipeline_layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda match: match.group(1) * int(match.group(2)), text)
    return text.split("|")


def megatron_params(spec: ModelSpec, layout: MegatronLayout, rank: int, names: Names = "local") -> dict[str, ShardSpec]:
    """Every parameter and persistent buffer of ``rank``, by its name in GPTModel, and what it is made of.

    Raises:
        ValueError: ``layout`` cannot hold ``spec``.
    """
    layout.check(spec)
    assert 0 <= rank < layout.world_size, f"rank {rank} of {layout.world_size}"
    params: dict[str, ShardSpec] = {}
    for vp in range(layout.vpp):
        prefix = f"model{vp}." if layout.vpp > 1 else ""
        params.update((prefix + name, shard) for name, shard in _chunk(spec, layout, rank, vp, names))
    return params


def _chunk(
    spec: ModelSpec, layout: MegatronLayout, rank: int, vp: int, names: Names
) -> Iterator[tuple[str, ShardSpec]]:
    """Chunk ``vp`` of ``rank``: embedding on the first, layers, final norm and output head on the last."""
    at = layout.dense(rank)
    sizes = spec.sizes(layout.padded_vocab(spec.vocab))
    is_first, is_last = (at.pp, vp) == (0, 0), (at.pp, vp) == (layout.pp - 1, layout.vpp - 1)
    if is_first:
        yield EMBEDDING.megatron, EMBEDDING.op.shard(sizes, layout.tp, at.tp)
    for local, layer in enumerate(layout.stage_layers(spec.layers, at.pp, vp)):
        rename = _te_names(spec, layer) if names == "te" else {}
        for param in spec.params(layer):
            for name, shard in _layer_param(param, sizes, layout, rank, names, layer_prefix(layer)):
                yield f"decoder.layers.{local}.{rename.get(name, name)}", shard
    if is_last:
        yield FINAL_NORM.megatron, FINAL_NORM.op.shard(sizes, layout.tp, at.tp)
    if is_last and not spec.tied:
        yield HEAD.megatron, HEAD.op.shard(sizes, layout.tp, at.tp)
    if is_last and spec.tied and not is_first:
        yield HEAD.megatron, replace(EMBEDDING.op.shard(sizes, layout.tp, at.tp), is_copy=True)


def _layer_param(
    param: ParamMap, sizes: Sizes, layout: MegatronLayout, rank: int, names: Names, hf_prefix: str
) -> Iterator[tuple[str, ShardSpec]]:
    """The parameter of ``rank`` that ``param`` describes, or one for every expert the rank owns."""
    if not param.per_expert:
        yield param.megatron, relocated(param.op.shard(sizes, layout.tp, layout.dense(rank).tp), hf_prefix)
        return
    at, count = layout.expert(rank), sizes["experts"] // layout.ep
    shard = param.op.shard(sizes, layout.etp, at.etp)
    for local in range(count):
        name = param.megatron.replace("{expert}", str(local))
        yield _te_expert(name) if names == "te" else name, relocated(shard, hf_prefix, at.ep * count + local)


def _te_names(spec: ModelSpec, layer: int) -> dict[str, str]:
    """Local names that Transformer Engine's layer spec changes: it fuses a norm into the linear layer after it."""
    fused = {}
    if spec.latent is None:
        fused["input_layernorm.weight"] = "self_attention.linear_qkv.layer_norm_weight"
    else:
        fused["self_attention.q_layernorm.weight"] = "self_attention.linear_q_up_proj.layer_norm_weight"
        fused["self_attention.kv_layernorm.weight"] = "self_attention.linear_kv_up_proj.layer_norm_weight"
    if layer < spec.dense_layers:
        fused["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    return fused


def _te_expert(local_name: str) -> str:
    """TEGroupedMLP keeps an expert's number at the end of the name."""
    expert, linear = local_name.removeprefix("mlp.experts.local_experts.").split(".", 1)
    return f"mlp.experts.{linear}{expert}"
