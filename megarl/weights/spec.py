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
}
"""What transformers assumes of a family where config.json says nothing, when it is not what Llama's does."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Architecture and sizes of a policy. Dense models have ``experts`` 0, and so ``expert_ffn`` and ``top_k``.

    Example: Qwen3-0.6B is ``ModelSpec(family="qwen3", hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128,
    ffn=3072, vocab=151936, tied=True, ...)``
    """

    family: str
    """``model_type`` of config.json: llama, qwen2, qwen3, qwen3_moe or mixtral."""
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
        ffn = _size(config, "intermediate_size")
        spec = cls(
            family=family.name,
            hidden=hidden,
            layers=_size(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", default=heads if family.name == "llama" else None),
            head_dim=_size(config, "head_dim", default=hidden // heads),
            ffn=ffn,
            vocab=_size(config, "vocab_size"),
            experts=_num_experts(config) if family.is_moe else 0,
            expert_ffn=_expert_ffn(config, family, ffn),
            top_k=_size(config, "num_experts_per_tok") if family.is_moe else 0,
            norm_topk_prob=family.name == "mixtral" or (family.is_moe and bool(config.get("norm_topk_prob", False))),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_theta=float(_rope(config).get("rope_theta", config.get("rope_theta", 1e4))),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=_size(config, "max_position_embeddings"),
        )
        spec._check_sizes()
        return spec

    @property
    def params(self) -> tuple[ParamMap, ...]:
        """The parameters of one layer."""
        return FAMILIES[self.family].layer

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
            "vocab": self.vocab,
            "padded_vocab": padded_vocab or self.vocab,
        }

    def hf_tensors(self) -> dict[str, Shape]:
        """Name and shape of every tensor that the model's safetensors files must hold."""
        sizes = self.sizes()
        shapes: dict[str, Shape] = {}
        for param in (EMBEDDING, FINAL_NORM) if self.tied else (EMBEDDING, FINAL_NORM, HEAD):
            shapes.update((tensor.name, tensor.shape(sizes)) for tensor in param.op.tensors)
        for layer in range(self.layers):
            for param in self.params:
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
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary embeddings turn pairs; use an even one")
        if self.top_k > self.experts:
            raise ValueError(
                f"num_experts_per_tok ({self.top_k}) must not exceed the number of experts ({self.experts}); lower it"
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
    """Qwen3-MoE calls it ``num_experts``, Mixtral and transformers 5 ``num_local_experts``."""
    return _size(config, "num_experts" if "num_experts" in config else "num_local_experts")


def _expert_ffn(config: Config, family: Family, ffn: int) -> int:
    """Mixtral has one width for everything."""
    if not family.is_moe:
        return 0
    return ffn if family.name == "mixtral" else _size(config, "moe_intermediate_size")


def _rope(config: Config) -> Config:
    """Rotary settings: ``rope_parameters`` of transformers 5, ``rope_scaling`` beside ``rope_theta`` before it."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _refuse_unsupported(config: Config, family: Family) -> None:
    """Refuse what would compute another function than the trainer's and the engine's."""
    rope = _rope(config)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    window = "sliding_window" in config and config.get("use_sliding_window", family.name in ("llama", "mixtral"))
    mixed = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    rules: list[tuple[bool, str, object, str]] = [
        (config.get("hidden_act", "silu") != "silu", "hidden_act", config.get("hidden_act"), "silu"),
        (rope_type not in ("default", None), "rope type", rope_type, "default (no rope scaling)"),
        (partial not in (None, 1, 1.0), "partial_rotary_factor", partial, "1"),
        (bool(window), "sliding_window", config.get("sliding_window"), "off (null, or use_sliding_window false)"),
        (bool(mixed), "layer_types", mixed, "all full_attention"),
        (bool(config.get("attention_bias")), "attention_bias", True, "false: it also puts a bias on o_proj"),
        (bool(config.get("mlp_bias")), "mlp_bias", True, "false"),
        (bool(config.get("mlp_only_layers")), "mlp_only_layers", config.get("mlp_only_layers"), "empty"),
        (config.get("decoder_sparse_step", 1) != 1, "decoder_sparse_step", config.get("decoder_sparse_step"), "1"),
        (bool(config.get("quantization_config")), "quantization_config", "present", "absent: dequantise it first"),
    ]
    for refused, key, value, allowed in rules:
        if refused:
            raise ValueError(
                f"{key} ({value!r}) of this {family.name} model must be {allowed}; take a model without it"
            )
