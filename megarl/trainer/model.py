"""One rank's share of the policy: Megatron-Core's GPTModel for a model family, filled from Hugging Face files.

With interleaved pipelines a rank has several chunks, each a GPTModel of its own; everywhere they travel as a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.config import ParallelConfig, TrainerConfig
from megarl.precision import RECIPES
from megarl.trainer.attention import PackedAttention
from megarl.trainer.latent import LatentSelfAttention
from megarl.trainer.norm import RMSNorm
from megarl.weights.megatron_files import open_reader
from megarl.weights.megatron_layout import MegatronLayout, Names, megatron_params
from megarl.weights.spec import ModelSpec


def parameter_names() -> Names:
    """Which layer spec, and so which parameter names, this machine gets: Transformer Engine's on GPUs."""
    return "te" if torch.cuda.is_available() else "local"


def transformer_config(spec: ModelSpec, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron's settings for ``spec`` under the parallel sizes and precision of ``trainer``."""
    recipe, gpu = RECIPES[trainer.precision.recipe], torch.cuda.is_available()
    dtype = torch.bfloat16 if recipe.bf16 else torch.float32
    kind = MLATransformerConfig if spec.latent else TransformerConfig
    return kind(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
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
        apply_rope_fusion=gpu and (spec.latent is None or spec.yarn is not None),
        **recipe.megatron,
        **_parallel_settings(trainer.parallel),
        **_attention_settings(spec),
        **_moe_settings(spec, trainer, gpu),
    )


def _parallel_settings(sizes: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        # Sent together, with two stages the activation and the gradient would be taken for each other.
        "overlap_p2p_comm": sizes.vpp > 1,
        "batch_p2p_comm": sizes.vpp == 1,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
        "sequence_parallel": sizes.tp > 1,
        "num_layers_in_first_pipeline_stage": sizes.first_stage_layers,
        "num_layers_in_last_pipeline_stage": sizes.last_stage_layers,
        "pipeline_model_parallel_layout": sizes.pipeline_layout or None,
    }


def _attention_settings(spec: ModelSpec) -> dict[str, Any]:
    if spec.latent is None:
        return {"num_query_groups": spec.kv_heads, "kv_channels": spec.head_dim}
    sizes = spec.latent
    settings: dict[str, Any] = {
        "q_lora_rank": sizes.q_lora,
        "kv_lora_rank": sizes.kv_lora,
        "qk_head_dim": sizes.nope_dim,
        "qk_pos_emb_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.v_dim,
        "rotary_base": spec.rope_theta,
        "rope_type": "rope",
    }
    if spec.yarn is not None:
        settings |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": spec.yarn.factor,
            "original_max_position_embeddings": spec.yarn.original_positions,
            "beta_fast": spec.yarn.beta_fast,
            "beta_slow": spec.yarn.beta_slow,
            "mscale": spec.yarn.mscale,
            "mscale_all_dim": spec.yarn.mscale_all_dim,
        }
    return settings


def _moe_settings(spec: ModelSpec, trainer: TrainerConfig, gpu: bool) -> dict[str, Any]:
    if not spec.experts:
        return {}
    return {
        "num_moe_experts": spec.experts,
        "moe_layer_freq": [int(layer >= spec.dense_layers) for layer in range(spec.layers)],
        "moe_ffn_hidden_size": spec.expert_ffn,
        "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
        "moe_router_topk": spec.top_k,
        "moe_router_load_balancing_type": "aux_loss" if trainer.moe_aux_loss_coef else "none",
        "moe_aux_loss_coeff": trainer.moe_aux_loss_coef,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": gpu,
        "moe_permute_fusion": gpu,
        **_router_settings(spec),
    }


def _router_settings(spec: ModelSpec) -> dict[str, Any]:
    router = spec.sigmoid_router
    if router is None:
        # softmax over the chosen k only equals softmax over all, renormalised
        return {"moe_router_pre_softmax": not spec.norm_topk_prob}
    settings: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": router.scale,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # balance is pretraining's business; here it would move the policy
    }
    if router.groups > 1:
        settings |= {"moe_router_num_groups": router.groups, "moe_router_group_topk": router.top_groups}
    return settings


def layer_spec(spec: ModelSpec, *, experts: bool) -> ModuleSpec:
    """Transformer Engine's layers on GPUs; on a CPU the local ones with our RMSNorm and packed attention.

    ``experts``: a layer with experts, not with one MLP.
    """
    common: dict[str, Any] = {
        "num_experts": spec.experts if experts else None,
        "qk_layernorm": spec.qk_norm,
        "multi_latent_attention": spec.latent is not None,
    }
    if parameter_names() == "te":
        return get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=experts, **common)
    layer = get_gpt_layer_local_spec(moe_grouped_gemm=False, normalization="RMSNorm", **common)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    if spec.latent is not None:
        layer.submodules.self_attention.module = LatentSelfAttention
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    for norm in ("q_layernorm", "k_layernorm", "kv_layernorm") if spec.qk_norm else ():
        if hasattr(attention, norm):
            setattr(attention, norm, RMSNorm)
    return layer


def build_model(spec: ModelSpec, trainer: TrainerConfig, layout: MegatronLayout) -> list[DistributedDataParallel]:
    """This rank's chunks of the model, uninitialised, wrapped for gradient reduction in fp32."""
    config = transformer_config(spec, trainer)
    chunks = [_build_chunk(spec, config, layout, vp) for vp in range(layout.vpp)]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]


def _build_chunk(spec: ModelSpec, config: TransformerConfig, layout: MegatronLayout, vp: int) -> torch.nn.Module:
    pp, vp_stage = parallel_state.get_pipeline_model_parallel_rank(), vp if layout.vpp > 1 else None
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(spec, layout.stage_layers(spec.layers, pp, vp)),
        vocab_size=layout.padded_vocab(spec.vocab),
        max_sequence_length=spec.max_positions,
        pre_process=(pp, vp) == (0, 0),
        post_process=(pp, vp) == (layout.pp - 1, layout.vpp - 1),
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
        rotary_percent=spec.rotary_fraction,
        rotary_base=spec.rope_theta,
        vp_stage=vp_stage,
    )
    _reduce_experts_apart(model)
    if torch.cuda.is_available():
        model = model.cuda()
    return Float16Module(config, model) if config.bf16 else model


def _reduce_experts_apart(model: torch.nn.Module) -> None:
    """Have expert gradients summed over the experts' own data-parallel group.

    Megatron does so with EP > 1 only. With TP > 1, EP 1 and ETP 1 the tensor-parallel ranks hold whole copies of every
    expert, each of which saw other tokens; left in the dense group their gradients would never meet and the copies
    drift apart.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]


def _block_spec(spec: ModelSpec, layers: Iterable[int]) -> TransformerBlockSubmodules:
    """The given layers, and the final norm."""
    norm = _te_norm() if parameter_names() == "te" else RMSNorm
    layer_specs = [layer_spec(spec, experts=layer >= spec.dense_layers) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm)


def _te_norm() -> Any:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside its wrappers."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def live_tensors(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer of this rank, by the name that ``megatron_params`` gives it."""
    tensors: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"model{number}." if len(chunks) > 1 else ""
        model = bare(chunk)
        tensors |= {prefix + name: parameter for name, parameter in model.named_parameters()}
        tensors |= {prefix + name: buffer for name, buffer in _persistent_buffers(model)}
    return tensors


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf not in module._non_persistent_buffers_set:
                yield f"{path}.{leaf}", buffer


def load_weights(
    chunks: Sequence[torch.nn.Module], folder: Path, spec: ModelSpec, layout: MegatronLayout, rank: int
) -> None:
    """Fill every parameter and buffer of this rank, reading only the bytes it owns.

    Raises:
        RuntimeError: the layout's names or shapes are not those of the built model.
    """
    shards = megatron_params(spec, layout, rank, names=parameter_names())
    tensors = live_tensors(chunks)
    if shards.keys() != tensors.keys():
        raise RuntimeError(
            f"rank {rank}: the layout and the built model disagree on parameters: "
            f"only in the layout {sorted(shards.keys() - tensors.keys())[:5]}, "
            f"only in the model {sorted(tensors.keys() - shards.keys())[:5]}"
        )
    with torch.no_grad(), open_reader(folder) as reader:
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != tuple(shards[name].shape):
                raise RuntimeError(
                    f"rank {rank}: {name} has shape {tuple(tensor.shape)}, the layout says {tuple(shards[name].shape)}"
                )
            if not isinstance(tensor, torch.nn.Parameter):  # a buffer, which the wrapper for bf16 had converted too
                tensor.data = tensor.data.float()
            tensor.copy_(reader.read(shards[name], tensor.dtype))
