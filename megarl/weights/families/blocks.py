"""The parts decoder families are put together from. Every line is one parameter: Megatron's name, vLLM's, the op."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.weights.mappings import QKV, Columns, GateUp, ParamMap, Tensor, Vocab, Whole

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
    """A decoder architecture: the parameters of one layer, all layers being alike."""

    name: str
    """``model_type`` of config.json."""
    layer: tuple[ParamMap, ...]

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value projections have biases."""
        return self._has("self_attention.linear_qkv.bias")

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self._has("self_attention.q_layernorm.weight")

    @property
    def is_moe(self) -> bool:
        """Whether the MLP is a mixture of experts."""
        return any(param.per_expert for param in self.layer)

    def _has(self, megatron: str) -> bool:
        return any(param.megatron == megatron for param in self.layer)


def attention(*, qkv_bias: bool = False, qk_norm: bool = False) -> tuple[ParamMap, ...]:
    """Input norm and grouped-query attention."""
    params = [
        _norm("input_layernorm.weight", "input_layernorm.weight", "hidden"),
        ParamMap("self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight", _qkv("weight", "hidden")),
        ParamMap(
            "self_attention.linear_proj.weight",
            "self_attn.o_proj.weight",
            Columns(Tensor("self_attn.o_proj.weight", "hidden", "q")),
        ),
    ]
    if qkv_bias:
        params.append(ParamMap("self_attention.linear_qkv.bias", "self_attn.qkv_proj.bias", _qkv("bias", None)))
    if qk_norm:
        params.append(_norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head_dim"))
        params.append(_norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head_dim"))
    return tuple(params)


def dense_mlp() -> tuple[ParamMap, ...]:
    """Post-attention norm and a SwiGLU MLP."""
    return (
        _norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
        ParamMap(
            "mlp.linear_fc1.weight",
            "mlp.gate_up_proj.weight",
            GateUp(Tensor("mlp.gate_proj.weight", "ffn", "hidden"), Tensor("mlp.up_proj.weight", "ffn", "hidden")),
        ),
        ParamMap(
            "mlp.linear_fc2.weight",
            "mlp.down_proj.weight",
            Columns(Tensor("mlp.down_proj.weight", "hidden", "ffn")),
        ),
    )


def moe(module: str, *, gate: str, up: str, down: str) -> tuple[ParamMap, ...]:
    """Post-attention norm, router and experts; ``module`` is the block's name in HF and vLLM alike."""
    expert = module + ".experts.{expert}."
    router = module + ".gate.weight"
    return (
        _norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden"),
        ParamMap("mlp.router.weight", router, Whole(Tensor(router, "experts", "hidden"))),
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


def _norm(megatron: str, hf: str, size: str) -> ParamMap:
    return ParamMap(megatron, hf, Whole(Tensor(hf, size)))


def _qkv(kind: str, cols: str | None) -> QKV:
    q, k, v = (
        Tensor(f"self_attn.{letter}_proj.{kind}", rows, cols) for letter, rows in (("q", "q"), ("k", "kv"), ("v", "kv"))
    )
    return QKV(q, k, v)
