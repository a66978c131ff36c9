from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.weights.spec import ModelSpec
from tests.weights.models import CONFIGS, QWEN3_30B_A3B

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "SmolLM2-135M": (
        {
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_theta": 100000,
            "rope_scaling": None,
            "tie_word_embeddings": True,
        },
        134_515_008,
    ),
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "Qwen3-30B-A3B": (
        QWEN3_30B_A3B,
        30_532_122_624,
    ),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "sliding_window": None,
        },
        46_702_792_704,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    config, count = PUBLISHED[name]
    assert ModelSpec.from_hf(config).num_params == count


def test_rope_theta_is_read_from_both_generations_of_transformers() -> None:
    old = CONFIGS["qwen3"] | {"rope_theta": 7e5, "rope_scaling": None}
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = {"rope_theta": 7e5, "rope_type": "default"}
    assert ModelSpec.from_hf(old) == ModelSpec.from_hf(new)
    assert ModelSpec.from_hf(new).rope_theta == 7e5


def test_what_a_config_leaves_out_is_what_transformers_assumes() -> None:
    def bare(model: str) -> ModelSpec:
        left_out = ("head_dim", "rope_theta", "rms_norm_eps", "norm_topk_prob")
        return ModelSpec.from_hf({k: v for k, v in CONFIGS[model].items() if k not in left_out} | {"hidden_size": 32})

    llama, qwen3, qwen3_moe, mixtral = (bare(model) for model in ("llama", "qwen3", "qwen3_moe", "mixtral"))
    assert (llama.head_dim, qwen3.head_dim, qwen3_moe.head_dim, mixtral.head_dim) == (4, 128, 4, 4)
    assert (llama.rope_theta, qwen3.rope_theta, mixtral.rope_theta) == (1e4, 1e4, 1e6)
    assert (llama.rms_eps, qwen3_moe.rms_eps, mixtral.rms_eps) == (1e-6, 1e-6, 1e-5)
    assert (llama.norm_topk_prob, qwen3_moe.norm_topk_prob, mixtral.norm_topk_prob) == (False, False, True)


def test_families_differ_in_biases_and_norms() -> None:
    flags = {
        name: (spec.qkv_bias, spec.qk_norm) for name, spec in ((n, ModelSpec.from_hf(c)) for n, c in CONFIGS.items())
    }
    assert flags["llama"] == flags["mixtral"] == (False, False)
    assert flags["qwen2"] == (True, False)
    assert flags["qwen3"] == flags["qwen3_moe"] == (False, True)


def test_a_tied_model_has_no_head_of_its_own() -> None:
    assert "lm_head.weight" not in ModelSpec.from_hf(CONFIGS["qwen2-tied"]).hf_tensors()
    assert ModelSpec.from_hf(CONFIGS["qwen2"]).hf_tensors()["lm_head.weight"] == (75, 24)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("llama", {"model_type": "gpt2"}, r"model_type \('gpt2'\) must be one of llama, qwen2"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act \('gelu'\).* must be silu"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope type \('llama3'\).* default"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope type \('linear'\)"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, r"rope type \('yarn'\)"),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": True}, r"sliding_window \(4096\)"),
        ("mixtral", {"sliding_window": 4096}, r"sliding_window \(4096\)"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types \(\['sliding_attention'\]\)"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers \(\[0\]\)"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, r"decoder_sparse_step \(2\)"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"num_hidden_layers": 0}, r"num_hidden_layers \(0\) in config.json must be an integer >= 1"),
        ("llama", {"vocab_size": None}, r"vocab_size \(None\)"),
        ("llama", {"hidden_size": "24"}, r"hidden_size \('24'\)"),
        (
            "llama",
            {"num_key_value_heads": 3},
            r"num_attention_heads \(8\) must be a multiple of num_key_value_heads \(3\)",
        ),
        ("llama", {"head_dim": 3}, r"head_dim \(3\) must be even"),
        (
            "mixtral",
            {"num_experts_per_tok": 5},
            r"num_experts_per_tok \(5\) must not exceed the number of experts \(4\)",
        ),
        ("qwen3_moe", {"num_experts": None}, r"num_local_experts \(None\)"),
    ],
)
def test_what_is_not_supported_is_refused_with_rule_and_value(model: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_hf(CONFIGS[model] | change)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "must be JSON"), ("[]", "must hold a JSON object, not list")],
)
def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_folder(tmp_path)


def test_a_folder_gives_the_spec_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral"]))
    assert ModelSpec.from_folder(tmp_path) == ModelSpec.from_hf(CONFIGS["mixtral"])
