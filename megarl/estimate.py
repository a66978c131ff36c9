"""What a run will take, before it starts: layout, memory per GPU, batch arithmetic. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.config import RunConfig, TrainerConfig
from megarl.precision import RECIPES
from megarl.trainer.settings import layout_of
from megarl.weights.engine_layout import engine_layout_of, engine_params
from megarl.weights.mappings import ShardSpec
from megarl.weights.megatron_layout import megatron_params
from megarl.weights.spec import ModelSpec

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Estimate:
    """Sizes in bytes, per GPU of the rank that holds most."""

    num_parameters: int
    trainer_weights: int
    trainer_fp8_copies: int
    """Transformer Engine keeps each matrix of the layers in fp8 too, as it is and transposed; 0 without fp8."""
    trainer_gradients: int
    trainer_optimizer: int
    trainer_activations: int
    trainer_logits: int
    engine_weights: int
    engine_kv_per_token: int

    @property
    def trainer_total(self) -> int:
        """What the trainer needs at its peak."""
        return (
            self.trainer_weights
            + self.trainer_fp8_copies
            + self.trainer_gradients
            + self.trainer_optimizer
            + self.trainer_activations
            + self.trainer_logits
        )


def estimate(config: RunConfig, spec: ModelSpec) -> Estimate:
    """Memory of one run, on the pipeline stage with most parameters; what CUDA and NCCL take comes on top."""
    sizes, rollout, layout = config.trainer.parallel, config.rollout, layout_of(config.trainer.parallel)
    recipe = RECIPES[config.trainer.precision.recipe]
    first_ranks = range(0, sizes.world_size, sizes.world_size // sizes.pp)
    stages = (_Counts.of(megatron_params(spec, layout, rank)) for rank in first_ranks)
    most = max(stages, key=lambda counts: counts.dense + counts.expert)
    state_bytes = 12 if recipe.bf16 else 8  # an fp32 copy and Adam's two moments; an fp32 parameter is its own copy
    engine = _Counts.of(engine_params(spec, engine_layout_of(rollout), 0))
    engine_itemsize = 2 if rollout.dtype == "bf16" else 4
    return Estimate(
        num_parameters=spec.num_params,
        trainer_weights=(most.dense + most.expert) * (2 if recipe.bf16 else 4),
        trainer_fp8_copies=2 * most.matrices if "fp8" in recipe.megatron else 0,
        trainer_gradients=(most.dense + most.expert) * 4,
        trainer_optimizer=most.dense * state_bytes // sizes.dp + most.expert * state_bytes // sizes.edp,
        trainer_activations=_activations(config.trainer, spec),
        trainer_logits=_logits(config.trainer, layout.padded_vocab(spec.vocab)),
        engine_weights=(engine.dense + engine.expert) * engine_itemsize,
        engine_kv_per_token=spec.layers * _kv_numbers(spec, rollout.tensor_parallel) * engine_itemsize,
    )


def _kv_numbers(spec: ModelSpec, tensor_parallel: int) -> int:
    """Numbers that one layer caches for one token on one engine rank; every rank caches the whole latent vector."""
    if spec.latent is not None:
        return spec.latent.kv_lora + spec.latent.rope_dim
    return 2 * max(1, spec.kv_heads // tensor_parallel) * spec.head_dim


@dataclass(frozen=True, slots=True)
class _Counts:
    """Numbers of parameters on one rank."""

    dense: int
    expert: int
    matrices: int
    """Those of both that are weights of a linear layer inside the decoder, the router's left out."""

    @classmethod
    def of(cls, params: dict[str, ShardSpec]) -> _Counts:
        counts = {name: math.prod(shard.shape) for name, shard in params.items()}
        expert = sum(count for name, count in counts.items() if ".experts." in name)
        matrices = sum(count for name, count in counts.items() if ".linear_" in name and len(params[name].shape) > 1)
        return cls(sum(counts.values()) - expert, expert, matrices)


def _activations(trainer: TrainerConfig, spec: ModelSpec) -> int:
    """Bytes kept for backward, without recomputation, by the first stage, which has ``pp`` micro-batches under way.

    Per token and layer, in numbers: input and output of both norms (4 hidden), queries and attention's output (2 q),
    keys and values (2 kv), then gate, up and their product (3 ffn); of every chosen expert also its input and output.
    With latent attention keys and values have as many heads as queries, and the low ranks are kept too. Everything
    is split over tp (sequence parallelism), and tokens are taken to spread evenly over the experts.
    """
    sizes, itemsize = spec.sizes(), 2 if RECIPES[trainer.precision.recipe].bf16 else 4
    attention = 4 * spec.hidden + 2 * sizes["q"]
    attention += sizes["q"] + sizes["kv_up"] + sizes["q_lora"] + sizes["kv_lora"] if spec.latent else 2 * sizes["kv"]
    experts = spec.top_k * (2 * spec.hidden + 3 * spec.expert_ffn) + 3 * spec.shared_ffn
    mlps = spec.dense_layers * 3 * spec.ffn + (spec.layers - spec.dense_layers) * experts
    numbers = spec.layers * attention + mlps  # pp micro-batches of layers / pp each
    return trainer.max_tokens_per_micro_batch * numbers * itemsize // trainer.parallel.tp


def _logits(trainer: TrainerConfig, padded_vocab: int) -> int:
    """Bytes of one micro-batch's logits and of their gradient: in fp32, and in bf16 too where the model computes so."""
    itemsize = 2 * (4 + 2) if RECIPES[trainer.precision.recipe].bf16 else 2 * 4
    return trainer.max_tokens_per_micro_batch * padded_vocab * itemsize // trainer.parallel.tp


def describe(config: RunConfig, spec: ModelSpec) -> str:
    """The plan as text: layout, memory, batch arithmetic."""
    sizes, rollout, need = config.trainer.parallel, config.rollout, estimate(config, spec)
    sequences = config.prompts_per_step * config.group_size
    per_update = sequences // config.algorithm.updates_per_step
    experts = f", {spec.experts} experts, top-{spec.top_k}" if spec.experts else ""
    longest = config.longest_sequence
    cache = need.engine_kv_per_token * longest * rollout.max_num_seqs
    rows = [
        f"model      {spec.family}, {_billions(need.num_parameters)} parameters, {spec.layers} layers{experts}",
        f"trainer    {sizes.world_size} ranks: tp {sizes.tp} x pp {sizes.pp} x dp {sizes.dp}; experts "
        f"etp {sizes.etp} x ep {sizes.ep} x edp {sizes.edp}; {config.trainer.precision.recipe}",
        f"engines    {rollout.replicas} x tensor parallel {rollout.tensor_parallel}, {rollout.dtype}",
        f"placement  {config.placement.kind}",
        "",
        "memory per trainer rank (largest)",
        _size_row("weights", need.trainer_weights),
        *([_size_row("fp8 copies", need.trainer_fp8_copies)] if need.trainer_fp8_copies else []),
        _size_row("gradients", need.trainer_gradients),
        _size_row("optimizer", need.trainer_optimizer),
        _size_row("activations, at most", need.trainer_activations),
        _size_row("logits, at most", need.trainer_logits),
        _size_row("sum", need.trainer_total),
        "memory per engine rank",
        _size_row("weights", need.engine_weights),
        f"{_size_row('KV cache, at most', cache)} for {rollout.max_num_seqs} sequences of {longest} tokens",
        "",
        "batch",
        f"  {config.prompts_per_step} prompts x {config.group_size} samples = {sequences} sequences a step, at most "
        f"{sequences * longest:,} tokens",
        f"  {_counted(config.algorithm.updates_per_step, 'update')} of {per_update} sequences; "
        f"{per_update // sizes.dp} for each of {_counted(sizes.dp, 'data-parallel rank')}",
        f"  micro-batches of at most {config.trainer.max_tokens_per_micro_batch:,} tokens",
        f"  {config.max_steps} steps = {config.max_steps * config.prompts_per_step:,} prompts",
    ]
    return "\n".join(rows)


def _size_row(label: str, size: int) -> str:
    return f"  {label:<20}" + (f"{size / GIB:9.2f} GiB" if size >= GIB else f"{size / MIB:9.2f} MiB")


def _billions(number: int) -> str:
    return f"{number / 1e9:.3f} B" if number >= 1e9 else f"{number / 1e6:.3f} M"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
