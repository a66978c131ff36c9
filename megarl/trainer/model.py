"""One rank's share of the policy: Megatron-Core's GPTModel for a model family, filled from Hugging Face files."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import TrainerConfig
from megarl.precision import RECIPES
from megarl.trainer.attention import PackedAttention
from megarl.trainer.norm import RMSNorm
from megarl.weights.hf_files import ShardReader
from megarl.weights.megatron_layout import MegatronLayout, Names, megatron_params
from megarl.weights.spec import ModelSpec


def parameter_names() -> Names:
    """Which layer spec, and so which parameter names, this machine gets: Transformer Engine's on GPUs."""
    return "te" if torch.cuda.is_available() else "local"


def transformer_config(spec: ModelSpec, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron's settings for ``spec`` under the parallel sizes and precision of ``trainer``."""
    sizes, recipe, gpu = trainer.parallel, RECIPES[trainer.precision.recipe], torch.cuda.is_available()
    dtype = torch.bfloat16 if recipe.bf16 else torch.float32
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_eps,
        qk_layernorm=spec.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        sequence_parallel=sizes.tp > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths, experts or not
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=recipe.bf16,
        perform_initialization=False,
        calculate_per_token_loss=True,  # Megatron then leaves the scale of loss and gradient alone
        finalize_model_grads_func=finalize_model_grads,
        gradient_accumulation_fusion=False,
        persist_layer_norm=gpu,
        bias_activation_fusion=gpu,
        bias_dropout_fusion=gpu,
        masked_softmax_fusion=False,
        apply_rope_fusion=gpu,
        **recipe.megatron,
        **_moe_settings(spec, trainer, gpu),
    )


def _moe_settings(spec: ModelSpec, trainer: TrainerConfig, gpu: bool) -> dict[str, object]:
    if not spec.experts:
        return {}
    return {
        "num_moe_experts": spec.experts,
        "moe_ffn_hidden_size": spec.expert_ffn,
        "moe_router_topk": spec.top_k,
        # softmax over the chosen k only equals softmax over all, renormalised
        "moe_router_pre_softmax": not spec.norm_topk_prob,
        "moe_router_load_balancing_type": "aux_loss" if trainer.moe_aux_loss_coef else "none",
        "moe_aux_loss_coeff": trainer.moe_aux_loss_coef,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": gpu,
        "moe_permute_fusion": gpu,
    }


def layer_spec(spec: ModelSpec) -> ModuleSpec:
    """Transformer Engine's layers on GPUs; on a CPU the local ones with our RMSNorm and packed attention."""
    if parameter_names() == "te":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=spec.experts or None, moe_grouped_gemm=bool(spec.experts), qk_layernorm=spec.qk_norm
        )
    layer = get_gpt_layer_local_spec(
        num_experts=spec.experts or None, moe_grouped_gemm=False, qk_layernorm=spec.qk_norm, normalization="RMSNorm"
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def build_model(spec: ModelSpec, trainer: TrainerConfig, layout: MegatronLayout) -> DistributedDataParallel:
    """This rank's stage of the model, uninitialised, wrapped for gradient reduction in fp32."""
    config = transformer_config(spec, trainer)
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(spec, config),
        vocab_size=layout.padded_vocab(spec.vocab),
        max_sequence_length=spec.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_base=spec.rope_theta,
    )
    _reduce_experts_apart(model)
    if torch.cuda.is_available():
        model = model.cuda()
    if config.bf16:
        model = Float16Module(config, model)
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        model,
    )


def _reduce_experts_apart(model: torch.nn.Module) -> None:
    """Have expert gradients summed over the experts' own data-parallel group.

    Megatron does so with EP > 1 only. With TP > 1, EP 1 and ETP 1 the tensor-parallel ranks hold whole copies of every
    expert, each of which saw other tokens; left in the dense group their gradients would never meet and the copies
    drift apart.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def _block_spec(spec: ModelSpec, config: TransformerConfig) -> ModuleSpec:
    """The layers of this stage and the final norm."""
    layer = layer_spec(spec)
    if parameter_names() == "te":
        return layer
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside its wrappers."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def load_from_hugging_face(
    model: torch.nn.Module, folder: Path, spec: ModelSpec, layout: MegatronLayout, rank: int
) -> None:
    """Fill every parameter of this rank, reading only the bytes it owns.

    Raises:
        RuntimeError: the layout's parameter names or shapes are not those of the built model.
    """
    shards = megatron_params(spec, layout, rank, names=parameter_names())
    parameters = dict(bare(model).named_parameters())
    if shards.keys() != parameters.keys():
        raise RuntimeError(
            f"rank {rank}: the layout and the built model disagree on parameters: "
            f"only in the layout {sorted(shards.keys() - parameters.keys())[:5]}, "
            f"only in the model {sorted(parameters.keys() - shards.keys())[:5]}"
        )
    with torch.no_grad(), ShardReader(folder) as reader:
        for name, parameter in parameters.items():
            if tuple(parameter.shape) != tuple(shards[name].shape):
                raise RuntimeError(
                    f"rank {rank}: {name} has shape {tuple(parameter.shape)}, "
                    f"the layout says {tuple(shards[name].shape)}"
                )
            parameter.copy_(reader.read(shards[name], parameter.dtype))
