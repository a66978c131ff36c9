from __future__ import annotations

from typing import Any

import pytest

from megarl.weights.engine_layout import EngineLayout, engine_params
from megarl.weights.megatron_layout import DenseCoordinate, ExpertCoordinate, MegatronLayout, megatron_params
from megarl.weights.spec import ModelSpec
from tests.weights.models import CONFIGS


def test_a_rank_has_a_place_on_the_dense_and_on_the_expert_grid() -> None:
    layout = MegatronLayout(tp=2, pp=2, ep=4, etp=1, world_size=16, cp=2)
    assert (layout.dp, layout.edp) == (2, 2)
    assert layout.dense(13) == DenseCoordinate(tp=1, cp=0, dp=1, pp=1)
    assert layout.expert(13) == ExpertCoordinate(etp=0, ep=1, edp=1, pp=1)


def test_both_grids_agree_on_the_stage() -> None:
    layout = MegatronLayout(tp=4, pp=2, ep=2, etp=2, world_size=8)
    assert [layout.dense(rank).pp for rank in range(8)] == [layout.expert(rank).pp for rank in range(8)]


def test_interleaved_stages_take_turns() -> None:
    layout = MegatronLayout(pp=2, vpp=2, world_size=2)
    assert [[list(layout.stage_layers(8, pp, vp)) for vp in range(2)] for pp in range(2)] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]


@pytest.mark.parametrize(
    ("ends", "stages"),
    [
        ({"first_stage_layers": 1}, [[0], [1, 2, 3], [4, 5, 6]]),
        ({"last_stage_layers": 1}, [[0, 1, 2], [3, 4, 5], [6]]),
        ({"first_stage_layers": 2, "last_stage_layers": 1}, [[0, 1], [2, 3, 4, 5], [6]]),
    ],
)
def test_first_and_last_stage_may_have_fewer_layers(ends: dict[str, int], stages: list[list[int]]) -> None:
    layout = MegatronLayout(pp=3, world_size=3, **ends)
    assert [list(layout.stage_layers(7, pp)) for pp in range(3)] == stages


def test_uneven_interleaved_stages_are_those_of_megatron() -> None:
    """By Megatron's formula vp * (f + m + z) + f + (pp - 1) * m / middle stages, with f 1, m 4, z 1 per chunk."""
    layout = MegatronLayout(pp=4, vpp=2, world_size=4, first_stage_layers=2, last_stage_layers=2)
    assert [[layout.stage_layers(12, pp, vp).start for pp in range(4)] for vp in range(2)] == [
        [0, 1, 3, 5],
        [6, 7, 9, 11],
    ]


def test_the_vocabulary_is_padded_no_more_than_asked() -> None:
    assert MegatronLayout(tp=2, world_size=2).padded_vocab(75) == 76
    assert MegatronLayout(tp=2, world_size=2, vocab_multiple=128).padded_vocab(75) == 256
    assert EngineLayout(2).padded_vocab(75) == 128


def test_parameters_have_the_names_of_the_layer_spec() -> None:
    dense, moe = ModelSpec.from_hf(CONFIGS["qwen2"]), ModelSpec.from_hf(CONFIGS["qwen3_moe"])
    layout = MegatronLayout()
    local, te = (set(megatron_params(dense, layout, 0, names)) for names in ("local", "te"))
    assert local - te >= {"decoder.layers.0.input_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.weight"}
    assert te - local >= {
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
    }
    assert "decoder.layers.3.self_attention.linear_qkv.bias" in local & te
    local, te = (set(megatron_params(moe, layout, 0, names)) for names in ("local", "te"))
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in local & te
    assert "decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight" in local - te
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight7" in te - local


def test_only_the_last_of_several_stages_copies_a_tied_embedding() -> None:
    spec = ModelSpec.from_hf(CONFIGS["qwen2-tied"])
    assert "output_layer.weight" not in megatron_params(spec, MegatronLayout(), 0)
    first, last = (megatron_params(spec, MegatronLayout(pp=2, world_size=2), rank) for rank in range(2))
    assert "output_layer.weight" not in first
    assert last["output_layer.weight"].is_copy
    assert last["output_layer.weight"].tiles == first["embedding.word_embeddings.weight"].tiles


def test_experts_that_do_not_divide_go_to_the_first_engine_ranks() -> None:
    layout = EngineLayout(4, expert_parallel=True)
    assert [list(layout.experts_of(6, rank)) for rank in range(4)] == [[0, 1], [2, 3], [4], [5]]


def test_vllm_names_of_experts_follow_the_family() -> None:
    for model, block in (("qwen3_moe", "mlp"), ("mixtral", "block_sparse_moe")):
        params = engine_params(ModelSpec.from_hf(CONFIGS[model]), EngineLayout(), 0)
        assert f"model.layers.0.{block}.experts.routed_experts.w13_weight" in params
        assert f"model.layers.0.{block}.gate.weight" in params


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 2}, r"world_size \(1\) must be a multiple of tp \* pp \* cp \(2\)"),
        ({"ep": 2, "etp": 2, "world_size": 2}, r"world_size \(2\) must be a multiple of etp \* ep \* pp \(4\)"),
        ({"vpp": 2}, r"vpp \(2\) must be 1 without pipeline"),
        ({"first_stage_layers": 1}, "must be None when pp is 1"),
    ],
)
def test_parallel_sizes_that_do_not_multiply_up_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegatronLayout(**sizes)


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ("llama", {"tp": 3}, r"heads \(8\) .* tp \(3\); use 1"),
        ("llama", {"tp": 16}, r"heads \(8\) .* tp \(16\); use 8"),
        ("llama", {"pp": 3}, r"4 of 4 layers.* 3 of pp \(3\)"),
        ("llama", {"pp": 4, "vpp": 2}, r"multiple of vpp \(2\)"),
        ("llama", {"pp": 2, "first_stage_layers": 5}, "-1 of 4 layers"),
        ("llama", {"ep": 2}, "has no experts"),
        ("mixtral", {"ep": 8}, r"experts \(4\) .* ep \(8\); use 4"),
        ("qwen3_moe", {"etp": 16}, r"expert ffn \(8\) .* etp \(16\); use 8"),
    ],
)
def test_trainer_layouts_that_cannot_hold_the_model_are_refused(
    model: str, sizes: dict[str, Any], message: str
) -> None:
    world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("ep", 1) * sizes.get("etp", 1)
    with pytest.raises(ValueError, match=message):
        megatron_params(ModelSpec.from_hf(CONFIGS[model]), MegatronLayout(world_size=world, **sizes), 0)


@pytest.mark.parametrize(
    ("model", "change", "layout", "message"),
    [
        ("llama", {}, EngineLayout(3), r"heads \(8\) .* tensor_parallel \(3\); use 1"),
        ("llama", {"intermediate_size": 12}, EngineLayout(8), r"ffn \(12\) .* use 4"),
        ("qwen3_moe", {"moe_intermediate_size": 12}, EngineLayout(8), r"expert ffn \(12\)"),
        ("llama", {"num_attention_heads": 24, "num_key_value_heads": 6}, EngineLayout(4), r"key/value heads \(6\)"),
        ("mixtral", {}, EngineLayout(8, expert_parallel=True), r"4 experts on 8 ranks"),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 12},
            EngineLayout(12),
            "padded",
        ),
    ],
)
def test_engine_layouts_that_cannot_serve_the_model_are_refused(
    model: str, change: dict[str, int], layout: EngineLayout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_params(ModelSpec.from_hf(CONFIGS[model] | change), layout, 0)


def test_trainer_key_value_heads_must_fit_tensor_parallel() -> None:
    spec = ModelSpec.from_hf(CONFIGS["llama"] | {"num_attention_heads": 24, "num_key_value_heads": 6})
    with pytest.raises(ValueError, match=r"tp \(4\) must divide the number of key/value heads \(6\)"):
        megatron_params(spec, MegatronLayout(tp=4, world_size=4), 0)
