"""The parts decoder families are put together from. Every line is one parameter: Megatron's name, vLLM's, the op."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.weights.mappings import QKV, Columns, GateUp, ParamMap, Rows, Tensor, Vocab, Whole

EMBEDDING = ParamMap(
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
    Vocab(Tensor("model.embed_tokens.weight", "vocab", "hidden")),
)
FINAL_NORM = ParamMap(
    "decoder.final_layernorm.weight", "model.norm.weight", Whole(Tensor("model.norm.weight", "hidden"))
)
HEAD = ParamMap("output_layer.weight", "lm_head.weight", Vocab(Tensor("lm_head.weight", "vocab", "hidden")))


@dataclass(frozen=True, slots=True)
class Family:
    """A decoder architecture: the parameters of a layer, which has one MLP (``dense``) or experts (``moe``)."""

    name: str
    """``model_type`` of config.json."""
    dense: tuple[ParamMap, ...] = ()
    moe: tuple[ParamMap, ...] = ()

    def has(self, megatron: str) -> bool:
        """Whether every model of the family has layers with the parameter that Megatron calls so."""
        return any(param.megatron == megatron and not param.when for param in self.dense + self.moe)

    @property
    def has_shared_experts(self) -> bool:
        """Whether some experts see every token."""
        return self.has("mlp.shared_experts.linear_fc1.weight")


def attention(*, qkv_bias: bool = False, qk_norm: bool | str = False) -> tuple[ParamMap, ...]:
    """Input norm and grouped-query attention.

    ``qk_norm``: queries and keys are normalised per head: always, never, or in models with the attribute named so.
    """
    params = [
        _norm("input_layernorm.weight", "input_layernorm.weight", "hidden"),
        ParamMap("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight", _qkv("weight", "hidden")),
        ParamMap("self_attention.linear_proj.weight", "self_attn.o_proj.weight", _output("q")),
    ]
    if qkv_bias:
        params.append(ParamMap("self_attention.linear_qkv.bias", "self_attn.qkv_proj.bias", _qkv("bias", None)))
    if qk_norm:
        when = qk_norm if isinstance(qk_norm, str) else ""
        params.append(_norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head_dim", when))
        params.append(_norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head_dim", when))
    return tuple(params)


def latent_attention() -> tuple[ParamMap, ...]:
    """Input norm and multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Down to a low rank, a norm, up to all heads; vLLM has both projections down in one parameter.
    """
    fused = "self_attn.fused_qkv_a_proj.weight"
    q_down = Tensor("self_attn.q_a_proj.weight", "q_lora", "hidden")
    kv_down = Tensor("self_attn.kv_a_proj_with_mqa.weight", "kv_lora_rope", "hidden")
    q_up = Tensor("self_attn.q_b_proj.weight", "q", "q_lora")
    kv_up = Tensor("self_attn.kv_b_proj.weight", "kv_up", "kv_lora")
    return (
        _norm("input_layernorm.weight", "input_layernorm.weight", "hidden"),
        ParamMap("self_attention.linear_q_down_proj.weight", fused, Whole(q_down)),
        ParamMap("self_attention.linear_kv_down_proj.weight", fused, Whole(kv_down)),
        _norm("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", "q_lora"),
        ParamMap("self_attention.linear_q_up_proj.weight", q_up.name, Rows(q_up)),
        _norm("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", "kv_lora"),
        ParamMap("self_attention.linear_kv_up_proj.weight", kv_up.name, Rows(kv_up)),
        ParamMap("self_attention.linear_proj.weight", "self_attn.o_proj.weight", _output("v")),
    )


def dense_mlp() -> tuple[ParamMap, ...]:
    """Post-attention norm and a SwiGLU MLP."""
    return (
        _norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
        *_swiglu("mlp.", "mlp.", "ffn"),
    )


def moe(module: str, *, gate: str, up: str, down: str, router_in_fp32: bool = False) -> tuple[ParamMap, ...]:
    """Post-attention norm, router and experts; ``module`` is the block's name in HF and vLLM alike."""
    expert = module + ".experts.{expert}."
    router = module + ".gate.weight"
    return (
        _norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
        ParamMap(
            "mlp.router.weight", router, Whole(Tensor(router, "experts", "hidden")), fp32_in_engine=router_in_fp32
        ),
        ParamMap(
            "mlp.experts.local_experts.{expert}.linear_fc1.weight",
            module + ".experts.routed_experts.w13_weight",
            GateUp(
                Tensor(expert + gate + ".weight", "expert_ffn", "hidden"),
                Tensor(expert + up + ".weight", "expert_ffn", "hidden"),
            ),
            per_expert=True,
        ),
        ParamMap(
            "mlp.experts.local_experts.{expert}.linear_fc2.weight",
            module + ".experts.routed_experts.w2_weight",
            Columns(Tensor(expert + down + ".weight", "hidden", "expert_ffn")),
            per_expert=True,
        ),
    )


def expert_bias() -> ParamMap:
    """What is added to the router's scores when experts are chosen, and not when they are weighed.

    Auxiliary-loss-free balancing (arXiv:2408.15664). No gradient moves it.
    """
    name = "mlp.gate.e_score_correction_bias"
    return ParamMap("mlp.router.expert_bias", name, Whole(Tensor(name, "experts")), fp32_in_engine=True, is_buffer=True)


def shared_experts() -> tuple[ParamMap, ...]:
    """Experts that every token goes to, as one SwiGLU MLP."""
    return _swiglu("mlp.shared_experts.", "mlp.shared_experts.", "shared_ffn")


def _swiglu(megatron: str, hf: str, width: str) -> tuple[ParamMap, ...]:
    return (
        ParamMap(
            megatron + "linear_fc1.weight",
            hf + "gate_up_proj.weight",
            GateUp(Tensor(hf + "gate_proj.weight", width, "hidden"), Tensor(hf + "up_proj.weight", width, "hidden")),
        ),
        ParamMap(
            megatron + "linear_fc2.weight",
            hf + "down_proj.weight",
            Columns(Tensor(hf + "down_proj.weight", "hidden", width)),
        ),
    )


def _norm(megatron: str, hf: str, size: str, when: str = "") -> ParamMap:
    return ParamMap(megatron, hf, Whole(Tensor(hf, size)), when=when)


def _output(heads: str) -> Columns:
    return Columns(Tensor("self_attn.o_proj.weight", "hidden", heads))


def _qkv(kind: str, cols: str | None) -> QKV:
    q, k, v = (
        Tensor(f"self_attn.{letter}_proj.{kind}", rows, cols) for letter, rows in (("q", "q"), ("k", "kv"), ("v", "kv"))
    )
    return QKV(q, k, v)
