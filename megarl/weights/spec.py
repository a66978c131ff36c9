"""What a model is, read from its Hugging Face config.json, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.weights.families import FAMILIES, Family
from megarl.weights.families.blocks import EMBEDDING, FINAL_NORM, HEAD
from megarl.weights.mappings import ParamMap, Shape, view_2d

Config = Mapping[str, Any]

_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen3": {"head_dim": 128},
    "glm4_moe": {"partial_rotary_factor": 0.5, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
}
"""What transformers assumes of a family where config.json says nothing, when it is not what Llama's does."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434)."""

    q_lora: int
    """Rank of the queries' projection."""
    kv_lora: int
    """Rank of that of keys and values: what a KV cache holds, together with the rotated part of the key."""
    nope_dim: int
    """Part of a query's or key's head without rotary embedding."""
    rope_dim: int
    """The other part; the key's is shared by all heads."""
    v_dim: int

    @property
    def head_dim(self) -> int:
        """Size of a query's or key's head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class Yarn:
    """Rotary embeddings stretched to longer contexts (YaRN, arXiv:2309.00071), as DeepSeek-V3 has them."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """A router that scores every expert by itself (DeepSeek-V3, arXiv:2412.19437, equations 12 to 16)."""

    scale: float
    """The chosen experts' weights, made to sum to 1, are multiplied by it."""
    groups: int
    """Experts are in as many groups, of which a token uses ``top_groups``: those with the largest two best scores."""
    top_groups: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Architecture and sizes of a policy. Dense models have ``experts`` 0, and so ``expert_ffn`` and ``top_k``.

    Example: Qwen3-0.6B is ``ModelSpec(family="qwen3", hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128,
    ffn=3072, vocab=151936, tied=True, ...)``
    """

    family: str
    """``model_type`` of config.json, one of ``FAMILIES``."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of a dense MLP; Mixtral's experts have it too."""
    vocab: int
    """Rows of the embedding in the file, before any padding."""
    experts: int
    expert_ffn: int
    top_k: int
    norm_topk_prob: bool
    """Whether the weights of the chosen experts are made to sum to 1."""
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    """Whether the output head is the embedding."""
    rope_theta: float
    rms_eps: float
    max_positions: int
    dense_layers: int = 0
    """Layers without experts; they come first. All of them in a dense model."""
    shared_ffn: int = 0
    """Width of the experts that every token goes to, all together; 0 without."""
    rotary_fraction: float = 1.0
    """Part of every head that is rotated."""
    sigmoid_router: SigmoidRouter | None = None
    """None: a softmax over the experts."""
    latent: LatentAttention | None = None
    """None: grouped-query attention."""
    yarn: Yarn | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read ``folder/config.json``.

        Raises:
            ValueError: there is none, or the model is not supported.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} must be a Hugging Face model folder: it has no config.json; check the path")
        try:
            config = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must be JSON ({error}); copy the model folder again") from error
        if not isinstance(config, dict):
            raise ValueError(
                f"{path} must hold a JSON object, not {type(config).__name__}; copy the model folder again"
            )
        return cls.from_hf(config)

    @classmethod
    def from_hf(cls, config: Config) -> ModelSpec:
        """Read a config.json, as transformers 4 or 5 writes it.

        Raises:
            ValueError: something in it is not supported or missing.
        """
        family = _family(config)
        config = _DEFAULTS.get(family.name, {}) | {key: value for key, value in config.items() if value is not None}
        _refuse_unsupported(config, family)
        heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
        ffn, layers = _size(config, "intermediate_size"), _size(config, "num_hidden_layers")
        latent = _latent(config) if family.name == "deepseek_v3" else None
        is_moe = bool(family.moe)
        spec = cls(
            family=family.name,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", default=heads if family.name == "llama" else None),
            head_dim=latent.head_dim if latent else _size(config, "head_dim", default=hidden // heads),
            ffn=ffn,
            vocab=_size(config, "vocab_size"),
            experts=_num_experts(config) if is_moe else 0,
            expert_ffn=_expert_ffn(config, family, ffn),
            top_k=_size(config, "num_experts_per_tok") if is_moe else 0,
            norm_topk_prob=family.name == "mixtral" or (is_moe and bool(config.get("norm_topk_prob", False))),
            qkv_bias=family.has("self_attention.linear_qkv.bias"),
            qk_norm=family.has("self_attention.q_layernorm.weight") or bool(config.get("use_qk_norm", False)),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_theta=float(_rope(config).get("rope_theta", config.get("rope_theta", 1e4))),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=_size(config, "max_position_embeddings"),
            dense_layers=_dense_layers(config, family, layers),
            shared_ffn=_shared_ffn(config) if family.has_shared_experts else 0,
            rotary_fraction=_rotary_fraction(config),
            sigmoid_router=_sigmoid_router(config) if family.has("mlp.router.expert_bias") else None,
            latent=latent,
            yarn=_yarn(config),
        )
        spec._check_sizes()
        return spec

    def params(self, layer: int) -> tuple[ParamMap, ...]:
        """The parameters of ``layer``, counted from 0."""
        family = FAMILIES[self.family]
        lines = family.dense if layer < self.dense_layers else family.moe
        return tuple(line for line in lines if not line.when or getattr(self, line.when))

    def sizes(self, padded_vocab: int = 0) -> dict[str, int]:
        """The named dimensions that ``mappings`` speaks of; ``padded_vocab`` 0 means no padding."""
        return {
            "hidden": self.hidden,
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "ffn": self.ffn,
            "experts": self.experts,
            "expert_ffn": self.expert_ffn,
            "shared_ffn": self.shared_ffn,
            "vocab": self.vocab,
            "padded_vocab": padded_vocab or self.vocab,
            **self._latent_sizes(),
        }

    def _latent_sizes(self) -> dict[str, int]:
        if self.latent is None:
            return {}
        sizes = self.latent
        return {
            "q_lora": sizes.q_lora,
            "kv_lora": sizes.kv_lora,
            "kv_lora_rope": sizes.kv_lora + sizes.rope_dim,
            "kv_up": self.heads * (sizes.nope_dim + sizes.v_dim),
            "v": self.heads * sizes.v_dim,
        }

    def hf_tensors(self) -> dict[str, Shape]:
        """Name and shape of every tensor that the model's safetensors files must hold."""
        sizes = self.sizes()
        shapes: dict[str, Shape] = {}
        for param in (EMBEDDING, FINAL_NORM) if self.tied else (EMBEDDING, FINAL_NORM, HEAD):
            shapes.update((tensor.name, tensor.shape(sizes)) for tensor in param.op.tensors)
        for layer in range(self.layers):
            for param in self.params(layer):
                for expert in range(self.experts if param.per_expert else 1):
                    for tensor in param.op.tensors:
                        name = layer_prefix(layer) + tensor.name.replace("{expert}", str(expert))
                        shapes[name] = tensor.shape(sizes)
        return shapes

    @property
    def num_params(self) -> int:
        """Number of weights, a tied head counted once."""
        return sum(view_2d(shape).area for shape in self.hf_tensors().values())

    def _check_sizes(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads ({self.heads}) must be a multiple of num_key_value_heads ({self.kv_heads}); "
                "take the config.json that belongs to the weights"
            )
        if self.latent is None and self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary embeddings turn pairs; use an even one")
        if self.top_k > self.experts:
            raise ValueError(
                f"num_experts_per_tok ({self.top_k}) must not exceed the number of experts ({self.experts}); lower it"
            )
        router = self.sigmoid_router
        if router and (self.experts % router.groups or router.top_groups > router.groups):
            raise ValueError(
                f"n_group ({router.groups}) must divide the number of experts ({self.experts}) and be at least "
                f"topk_group ({router.top_groups}); take the config.json that belongs to the weights"
            )
        if router and router.groups > 1 and self.top_k != 2 * router.top_groups:
            raise ValueError(
                f"num_experts_per_tok ({self.top_k}) must be twice topk_group ({router.top_groups}) where n_group > 1: "
                "Megatron-Core ranks groups by their best num_experts_per_tok / topk_group experts, Hugging Face by "
                "their best two; use a model for which these are the same"
            )


def layer_prefix(layer: int) -> str:
    """What HF and vLLM put before the names of layer ``layer``, counted from 0."""
    return f"model.layers.{layer}."


def _family(config: Config) -> Family:
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"model_type ({name!r}) must be one of {', '.join(FAMILIES)}; write a file in weights/families for another"
        )
    return FAMILIES[name]


def _size(config: Config, key: str, *, default: int | None = None) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{key} ({value!r}) in config.json must be an integer >= 1; take the config.json of the weights"
        )
    return value


def _num_experts(config: Config) -> int:
    """Qwen3-MoE calls it ``num_experts``, DeepSeek and GLM ``n_routed_experts``, Mixtral ``num_local_experts``."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return _size(config, next((name for name in names if name in config), names[-1]))


def _expert_ffn(config: Config, family: Family, ffn: int) -> int:
    """Mixtral has one width for everything."""
    if not family.moe:
        return 0
    return ffn if family.name == "mixtral" else _size(config, "moe_intermediate_size")


def _dense_layers(config: Config, family: Family, layers: int) -> int:
    if not family.moe:
        return layers
    first = config.get("first_k_dense_replace", 0) if family.dense else 0
    if not isinstance(first, int) or not 0 <= first <= layers:
        raise ValueError(
            f"first_k_dense_replace ({first!r}) in config.json must be an integer from 0 to num_hidden_layers "
            f"({layers}); take the config.json of the weights"
        )
    return first


def _shared_ffn(config: Config) -> int:
    return _size(config, "n_shared_experts") * _size(config, "moe_intermediate_size")


def _sigmoid_router(config: Config) -> SigmoidRouter:
    return SigmoidRouter(
        scale=float(config.get("routed_scaling_factor", 1.0)),
        groups=_size(config, "n_group", default=1),
        top_groups=_size(config, "topk_group", default=1),
    )


def _latent(config: Config) -> LatentAttention:
    return LatentAttention(
        q_lora=_size(config, "q_lora_rank"),
        kv_lora=_size(config, "kv_lora_rank"),
        nope_dim=_size(config, "qk_nope_head_dim"),
        rope_dim=_size(config, "qk_rope_head_dim"),
        v_dim=_size(config, "v_head_dim"),
    )


def _rotary_fraction(config: Config) -> float:
    return float(_rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))


def _rope_type(config: Config) -> str:
    return str(_rope(config).get("rope_type", _rope(config).get("type")) or "default")


def _yarn(config: Config) -> Yarn | None:
    if _rope_type(config) != "yarn":
        return None
    rope = _rope(config)
    return Yarn(
        factor=float(rope["factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
        beta_fast=float(rope.get("beta_fast", 32)),
        beta_slow=float(rope.get("beta_slow", 1)),
        mscale=float(rope.get("mscale", 1)),
        mscale_all_dim=float(rope.get("mscale_all_dim", 0)),
    )


def _rope(config: Config) -> Config:
    """Rotary settings: ``rope_parameters`` of transformers 5, ``rope_scaling`` beside ``rope_theta`` before it."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _refuse_unsupported(config: Config, family: Family) -> None:
    """Refuse what would compute another function than the trainer's and the engine's."""
    rope_types = ("default", "yarn") if family.name == "deepseek_v3" else ("default",)
    fraction = _rotary_fraction(config)
    window = "sliding_window" in config and config.get("use_sliding_window", family.name in ("llama", "mixtral"))
    mixed = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    has_bias = family.has("self_attention.linear_qkv.bias")
    bias = bool(config.get("attention_bias", has_bias))
    rules: list[tuple[bool, str, object, str]] = [
        (config.get("hidden_act", "silu") != "silu", "hidden_act", config.get("hidden_act"), "silu"),
        (_rope_type(config) not in rope_types, "rope type", _rope_type(config), " or ".join(rope_types)),
        (fraction != 1 and family.name != "glm4_moe", "partial_rotary_factor", fraction, "1"),
        (bool(window), "sliding_window", config.get("sliding_window"), "off (null, or use_sliding_window false)"),
        (bool(mixed), "layer_types", mixed, "all full_attention"),
        (bias and not has_bias, "attention_bias", True, "false: it also puts a bias on o_proj"),
        (has_bias and not bias, "attention_bias", False, "true"),
        (bool(config.get("mlp_bias")), "mlp_bias", True, "false"),
        (bool(config.get("mlp_only_layers")), "mlp_only_layers", config.get("mlp_only_layers"), "empty"),
        (config.get("decoder_sparse_step", 1) != 1, "decoder_sparse_step", config.get("decoder_sparse_step"), "1"),
        (bool(config.get("quantization_config")), "quantization_config", "present", "absent: dequantise it first"),
        *_router_rules(config, family),
    ]
    for refused, key, value, allowed in rules:
        if refused:
            raise ValueError(
                f"{key} ({value!r}) of this {family.name} model must be {allowed}; take a model without it"
            )


def _router_rules(config: Config, family: Family) -> list[tuple[bool, str, object, str]]:
    """The engine only reads the experts' bias where config.json speaks of DeepSeek-V3's way of choosing."""
    if not family.has("mlp.router.expert_bias"):
        return []
    rules: list[tuple[bool, str, object, str]]
    rules = [(not config.get("norm_topk_prob", True), "norm_topk_prob", False, "true")]
    if family.name == "deepseek_v3":
        wanted = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        rules += [(config.get(key) != value, key, config.get(key), value) for key, value in wanted.items()]
        rules.append((config.get("rope_interleave") is False, "rope_interleave", False, "true"))
    return rules
