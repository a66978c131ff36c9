"""What a run will take, before it starts: layout, memory per GPU, batch arithmetic. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.config import RunConfig
from megarl.precision import RECIPES
from megarl.trainer.settings import layout_of
from megarl.weights.engine_layout import EngineLayout, engine_params
from megarl.weights.megatron_layout import MegatronLayout, megatron_params
from megarl.weights.spec import ModelSpec

GIB = 2**30
_ACTIVATION_BYTES = 34
"""Per token, hidden unit and layer, in 16 bit with flash attention: Korthikanti et al. 2022 (arXiv:2205.05198)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Sizes in bytes, per GPU of the rank that holds most."""

    num_parameters: int
    trainer_weights: int
    trainer_gradients: int
    trainer_optimizer: int
    trainer_activations: int
    engine_weights: int
    engine_kv_per_token: int

    @property
    def trainer_total(self) -> int:
        """What the trainer needs at its peak."""
        return self.trainer_weights + self.trainer_gradients + self.trainer_optimizer + self.trainer_activations


def estimate(config: RunConfig, spec: ModelSpec) -> Estimate:
    """Memory of one run. Activations are an upper estimate: everything of one micro-batch is kept."""
    sizes, rollout = config.trainer.parallel, config.rollout
    layout = layout_of(sizes)
    bf16 = RECIPES[config.trainer.precision.recipe].bf16
    stages = range(0, sizes.world_size, max(1, sizes.world_size // sizes.pp))
    counts = [_rank_counts(spec, layout, rank) for rank in stages]
    dense, expert = max(counts, key=sum)
    weights = (dense + expert) * (2 if bf16 else 4)
    optimizer = 12 if bf16 else 8  # fp32 copy and two moments; an fp32 parameter is its own copy
    engine = EngineLayout(tp=rollout.tensor_parallel)
    itemsize = 2 if rollout.dtype == "bf16" else 4
    engine_count = sum(math.prod(shard.shape) for shard in engine_params(spec, engine, 0).values())
    kv_heads = max(1, spec.kv_heads // rollout.tensor_parallel)
    layers = math.ceil(spec.layers / sizes.pp)
    return Estimate(
        num_parameters=spec.num_params,
        trainer_weights=weights,
        trainer_gradients=(dense + expert) * 4,
        trainer_optimizer=dense * optimizer // sizes.dp + expert * optimizer // sizes.edp,
        trainer_activations=config.trainer.max_tokens_per_micro_batch
        * spec.hidden
        * layers
        * _ACTIVATION_BYTES
        // sizes.tp,
        engine_weights=engine_count * itemsize,
        engine_kv_per_token=2 * spec.layers * kv_heads * spec.head_dim * itemsize,
    )


def _rank_counts(spec: ModelSpec, layout: MegatronLayout, rank: int) -> tuple[int, int]:
    """(dense parameters, expert parameters) of one trainer rank."""
    dense = expert = 0
    for name, shard in megatron_params(spec, layout, rank, names="local").items():
        if ".experts." in name:
            expert += math.prod(shard.shape)
        else:
            dense += math.prod(shard.shape)
    return dense, expert


def describe(config: RunConfig, spec: ModelSpec) -> str:
    """The plan as text: layout, memory, batch arithmetic."""
    sizes, rollout, need = config.trainer.parallel, config.rollout, estimate(config, spec)
    sequences = config.prompts_per_step * config.group_size
    per_update = sequences // config.algorithm.updates_per_step
    experts = f", {spec.experts} experts, top-{spec.top_k}" if spec.experts else ""
    longest = min(rollout.max_model_len, config.data.max_prompt_tokens + rollout.max_tokens)
    rows = [
        f"model      {spec.family}, {need.num_parameters / 1e9:.3f} B parameters, {spec.layers} layers{experts}",
        f"trainer    {sizes.world_size} ranks: tp {sizes.tp} x pp {sizes.pp} x dp {sizes.dp}; experts "
        f"etp {sizes.etp} x ep {sizes.ep} x edp {sizes.edp}; {config.trainer.precision.recipe}",
        f"engines    {rollout.replicas} x tensor parallel {rollout.tensor_parallel}, {rollout.dtype}",
        f"placement  {config.placement.kind}",
        "",
        "memory per trainer rank (largest)",
        *(
            f"  {label:<20}{value / GIB:9.2f} GiB"
            for label, value in (
                ("weights", need.trainer_weights),
                ("gradients", need.trainer_gradients),
                ("optimizer", need.trainer_optimizer),
                ("activations, at most", need.trainer_activations),
                ("sum", need.trainer_total),
            )
        ),
        "memory per engine rank",
        f"  {'weights':<20}{need.engine_weights / GIB:9.2f} GiB",
        f"  {'KV cache':<20}{need.engine_kv_per_token * longest * rollout.max_num_seqs / GIB:9.2f} GiB "
        f"for {rollout.max_num_seqs} sequences of {longest} tokens",
        "",
        "batch",
        f"  {config.prompts_per_step} prompts x {config.group_size} samples = {sequences} sequences a step, at most "
        f"{sequences * longest:,} tokens",
        f"  {config.algorithm.updates_per_step} update(s) of {per_update} sequences; "
        f"{per_update // sizes.dp} for each of {sizes.dp} data-parallel rank(s)",
        f"  micro-batches of at most {config.trainer.max_tokens_per_micro_batch:,} tokens",
        f"  {config.max_steps} steps = {config.max_steps * config.prompts_per_step:,} prompts",
    ]
    return "\n".join(rows)
