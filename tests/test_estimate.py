"""The arithmetic of ``megarl plan``, by hand on models small enough for it."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import RunConfig, from_dict, load
from megarl.estimate import describe, estimate
from megarl.weights.spec import ModelSpec
from tests.e2e.runs import ROOT

DENSE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE = DENSE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
ATTENTION = 8 * (8 + 4 + 4) + 8 * 8  # q, k, v and o
NORMS = 2 * 8
EXPERT = 3 * 8 * 16  # gate, up, down


def _config(recipe: str = "fp32", dtype: str = "fp32", tensor_parallel: int = 1, **parallel: int) -> RunConfig:
    return from_dict(
        {
            "name": "plan",
            "max_steps": 3,
            "prompts_per_step": 4,
            "group_size": 2,
            "data": {"task": "reasoning_gym/chain_sum", "max_prompt_tokens": 20},
            "trainer": {
                "model": "model",
                "parallel": parallel,
                "precision": {"recipe": recipe},
                "max_tokens_per_micro_batch": 100,
            },
            "rollout": {
                "max_tokens": 12,
                "max_model_len": 64,
                "dtype": dtype,
                "tensor_parallel": tensor_parallel,
                "max_num_seqs": 5,
            },
        }
    )


def test_one_rank_holds_everything() -> None:
    need = estimate(_config(), ModelSpec.from_hf(DENSE))
    count = 2 * (ATTENTION + NORMS + EXPERT) + 8 + 2 * 10 * 8  # final norm, embedding, head
    assert need.num_parameters == count
    assert need.trainer_weights == need.trainer_gradients == 4 * count
    assert need.trainer_optimizer == 8 * count  # fp32: two moments
    assert need.trainer_fp8_copies == 0
    per_token_and_layer = 4 * 8 + 2 * 8 + 2 * 4 + 3 * 16
    assert need.trainer_activations == 100 * 2 * per_token_and_layer * 4
    assert need.trainer_logits == 2 * 100 * 10 * 4
    assert need.engine_weights == 4 * (count + 2 * (64 - 10) * 8)  # vLLM pads the vocabulary to 64
    assert need.engine_kv_per_token == 2 * 2 * 2 * 2 * 4  # k and v, layers, heads, head size, bytes


def test_optimizer_state_is_cut_over_the_replicas_of_dense_and_of_expert_weights() -> None:
    need = estimate(_config("bf16", "bf16", 2, world_size=8, tp=2, pp=2, ep=2), ModelSpec.from_hf(MOE))
    # per stage: one layer; cut over tp 2 but for norms and router. The last stage has head and final norm, and so most.
    dense = ATTENTION // 2 + NORMS + 4 * 8 + 10 * 8 // 2 + 8
    expert = 2 * EXPERT  # 2 of the 4, whole: etp is 1
    assert need.trainer_weights == 2 * (dense + expert)
    assert need.trainer_gradients == 4 * (dense + expert)
    assert need.trainer_optimizer == 12 * dense // 2 + 12 * expert // 2  # dp 8/(2x2), edp 8/(1x2x2); fp32 copy too
    per_token_and_layer = 4 * 8 + 2 * 8 + 2 * 4 + 2 * (2 * 8 + 3 * 16)
    assert need.trainer_activations == 100 * 2 * per_token_and_layer * 2 // 2
    assert need.trainer_logits == 2 * 100 * 10 * (4 + 2) // 2
    assert need.engine_kv_per_token == 2 * 2 * 1 * 2 * 2
    assert estimate(_config("bf16", world_size=8, ep=4), ModelSpec.from_hf(MOE)).trainer_optimizer == (
        12 * (2 * (ATTENTION + NORMS + 4 * 8) + 8 + 2 * 10 * 8) // 8 + 12 * 2 * EXPERT // 2
    )


def test_an_fp8_recipe_keeps_the_matrices_of_the_layers_twice_more() -> None:
    need = estimate(_config("blockwise", world_size=2, ep=2), ModelSpec.from_hf(MOE))
    assert need.trainer_fp8_copies == 2 * 2 * (ATTENTION + 2 * EXPERT)
    parts = need.trainer_weights + need.trainer_gradients + need.trainer_optimizer + need.trainer_activations
    assert need.trainer_total == parts + need.trainer_fp8_copies + need.trainer_logits


def test_key_value_heads_are_repeated_on_engines_with_more_ranks() -> None:
    assert estimate(_config(tensor_parallel=4), ModelSpec.from_hf(DENSE)).engine_kv_per_token == 2 * 2 * 1 * 2 * 4


def test_the_plan_says_what_a_step_is_made_of() -> None:
    text = describe(_config(world_size=2, tp=2), ModelSpec.from_hf(DENSE))
    for words in ("4 prompts x 2 samples = 8 sequences a step, at most 256 tokens", "1 update of 8 sequences"):
        assert words in text
    assert "for 5 sequences of 32 tokens" in text
    assert "3 steps = 12 prompts" in text
    assert "fp8 copies" not in text


def test_the_big_model_has_the_size_that_its_makers_publish() -> None:
    config = load(ROOT / "configs/qwen3_30b_a3b_grpo.yaml", [f"trainer.model={ROOT}/configs/models/Qwen3-30B-A3B"])
    need = estimate(config, ModelSpec.from_folder(config.trainer.model))
    assert need.num_parameters == 30_532_122_624
    experts = 48 * 128 * 3 * 2048 * 768
    assert need.trainer_optimizer == pytest.approx(
        12 * (experts / 8 + (need.num_parameters - experts) / 4 / 2), rel=0.01
    )
