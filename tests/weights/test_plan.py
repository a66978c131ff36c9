from __future__ import annotations

import contextlib
import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megarl.weights.engine_layout import EngineLayout, engine_params
from megarl.weights.mappings import Rect, ShardSpec, Tile, view_2d
from megarl.weights.megatron_layout import MegatronLayout, megatron_params
from megarl.weights.plan import Plan, cover_problem, make_plan, plan_between
from megarl.weights.spec import ModelSpec
from tests.weights.models import CONFIGS, QWEN3_30B_A3B, numbered_weights
from tests.weights.sharders import engine_shards, megatron_shards


def view(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(-1, 1)


def part(array: np.ndarray, rect: Rect) -> np.ndarray:
    return view(array)[rect.row0 : rect.row1, rect.col0 : rect.col1]


def executed(plan: Plan, sources: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """What the engine ranks hold after the plan; -1 where nothing was written."""
    results = [{name: np.full(shape, -1) for name, shape in shapes.items()} for shapes in plan.shapes]
    for op in plan.ops:
        part(results[op.dst_rank][op.dst_param], op.dst_rect)[:] = part(sources[op.src_rank][op.src_param], op.src_rect)
    for zero in plan.zeros:
        part(results[zero.dst_rank][zero.dst_param], zero.dst_rect)[:] = 0
    return results


def layouts(spec: ModelSpec) -> list[MegatronLayout]:
    """Trainer layouts that can hold ``spec``, of up to 8 ranks, without replicas and with two of each rank."""
    found = []
    for tp, pp, vpp, ep, etp, cp in itertools.product([1, 2, 4, 8], [1, 2, 4], [1, 2], [1, 2, 4, 8], [1, 2, 4], [1, 2]):
        smallest = math.lcm(tp * pp * cp, etp * ep * pp)
        for world in (smallest, 2 * smallest):
            with contextlib.suppress(ValueError):
                layout = MegatronLayout(tp, pp, ep, etp, world, vpp, cp, vocab_multiple=vpp * 8 - 7)
                layout.check(spec)
                if world <= 8:
                    found.append(layout)
    return found + [layout for layout in UNEVEN if _fits(layout, spec)]


UNEVEN = (
    MegatronLayout(pp=2, world_size=2, first_stage_layers=1),
    MegatronLayout(tp=2, pp=2, ep=2, world_size=8, last_stage_layers=1),
    MegatronLayout(pp=4, world_size=4, first_stage_layers=2, last_stage_layers=0, vocab_multiple=7),
    MegatronLayout(pp=2, etp=2, world_size=4, pipeline_layout="Ettt|tL"),
    MegatronLayout(tp=2, pp=2, vpp=2, world_size=4, pipeline_layout="Ett|t|t|L"),
    MegatronLayout(pp=4, ep=2, world_size=8, pipeline_layout="E|tt|tt|L"),
)


def _fits(layout: MegatronLayout, spec: ModelSpec) -> bool:
    try:
        layout.check(spec)
    except ValueError:
        return False
    return True


def engines(spec: ModelSpec) -> list[EngineLayout]:
    found = []
    kinds = [(False, "linear"), (True, "linear"), (True, "round_robin")]
    for tp, (expert_parallel, placement) in itertools.product([1, 2, 4, 8], kinds if spec.experts else kinds[:1]):
        with contextlib.suppress(ValueError):
            EngineLayout(tp, expert_parallel, placement).check(spec)
            found.append(EngineLayout(tp, expert_parallel, placement))
    return found


@pytest.mark.parametrize("model", CONFIGS)
def test_every_plan_moves_every_element_where_an_independent_sharder_puts_it(model: str) -> None:
    config = CONFIGS[model]
    spec = ModelSpec.from_hf(config)
    weights = numbered_weights(spec)
    wanted = {
        engine: engine_shards(config, weights, engine.tp, engine.expert_parallel, engine.placement)
        for engine in engines(spec)
    }
    compared = 0
    for number, trainer in enumerate(layouts(spec)[:: 3 if spec.experts else 1]):
        names = ("local", "te")[number % 2]
        sources = megatron_shards(config, weights, trainer, names)
        for engine, ranks in wanted.items():
            for rank, result in enumerate(executed(make_plan(spec, trainer, engine, names), sources)):
                assert result.keys() == ranks[rank].keys(), (trainer, engine, rank)
                for name, array in result.items():
                    np.testing.assert_array_equal(array, ranks[rank][name], err_msg=f"{trainer} {engine} {rank} {name}")
                compared += 1
    assert compared >= 700, f"only {compared} engine ranks compared"


@pytest.mark.parametrize("names", ["local", "te"])
@pytest.mark.parametrize("model", CONFIGS)
def test_trainer_shards_are_those_of_an_independent_sharder(model: str, names: str) -> None:
    config = CONFIGS[model]
    spec = ModelSpec.from_hf(config)
    weights = numbered_weights(spec)
    for layout in layouts(spec):
        for rank, wanted in enumerate(megatron_shards(config, weights, layout, names)):
            shards = megatron_params(spec, layout, rank, names)
            assert shards.keys() == wanted.keys(), (layout, rank)
            for name, shard in shards.items():
                assert shard.shape == wanted[name].shape, (layout, rank, name)
                rects = [tile.rect for tile in shard.tiles] + list(shard.zeros)
                assert cover_problem(rects, view_2d(shard.shape)) is None
                for tile in shard.tiles:
                    np.testing.assert_array_equal(
                        part(wanted[name], tile.rect),
                        part(weights[tile.hf_name], tile.hf_rect),
                        err_msg=f"{rank} {name}",
                    )
                for rect in shard.zeros:
                    assert not part(wanted[name], rect).any()


def test_a_large_plan_has_the_known_size() -> None:
    spec = ModelSpec.from_hf(QWEN3_30B_A3B)
    plan = make_plan(spec, MegatronLayout(tp=4, pp=2, ep=8, world_size=16), EngineLayout(8, expert_parallel=True), "te")
    assert len(plan.ops) == 8 * 2739
    assert round(plan.num_bytes(0, itemsize=2) / 2**30, 2) == 7.15
    assert sum(len(plan.for_source(rank)) for rank in range(16)) == len(plan.ops)
    assert len(plan.for_destination(3)) == 2739


def test_the_plan_of_one_rank_is_its_part_of_the_whole() -> None:
    spec = ModelSpec.from_hf(CONFIGS["deepseek_v3"])
    trainer, engine = MegatronLayout(tp=2, pp=2, ep=2, world_size=8), EngineLayout(4, expert_parallel=True)
    whole = make_plan(spec, trainer, engine)
    for rank in range(4):
        part_of_it = make_plan(spec, trainer, engine, dst_rank=rank)
        assert part_of_it.ops == whole.for_destination(rank)
        assert part_of_it.shapes[rank] == whole.shapes[rank]


def test_replicas_share_the_sending_evenly() -> None:
    spec = ModelSpec.from_hf(CONFIGS["llama"])
    plan = make_plan(spec, MegatronLayout(world_size=4), EngineLayout(4))
    sent = Counter({rank: sum(op.src_rect.area for op in plan.for_source(rank)) for rank in range(4)})
    assert max(sent.values()) <= 1.1 * min(sent.values()), sent


def test_only_a_tied_copy_is_unread() -> None:
    tied, untied = (ModelSpec.from_hf(CONFIGS[name]) for name in ("qwen2-tied", "qwen2"))
    layout = MegatronLayout(tp=2, pp=2, world_size=4)
    assert make_plan(tied, layout, EngineLayout()).unread == ((2, "output_layer.weight"), (3, "output_layer.weight"))
    assert make_plan(untied, layout, EngineLayout()).unread == ()


def test_tensor_parallel_ranks_that_match_send_each_other_nothing_foreign() -> None:
    spec = ModelSpec.from_hf(CONFIGS["qwen3"])
    plan = make_plan(spec, MegatronLayout(tp=4, world_size=4), EngineLayout(4))
    foreign = [op for op in plan.ops if op.src_rank != op.dst_rank and "proj" in op.hf_name]
    assert not foreign


DIGEST_SCRIPT = """
from tests.weights.models import CONFIGS
from megarl.weights.engine_layout import EngineLayout
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
spec = ModelSpec.from_hf(CONFIGS["qwen3_moe"])
print(make_plan(spec, MegatronLayout(tp=2, ep=2, world_size=4), EngineLayout(2)).digest)
"""


def test_the_digest_is_the_same_in_every_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST_SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    spec = ModelSpec.from_hf(CONFIGS["qwen3_moe"])
    assert digests == {make_plan(spec, MegatronLayout(tp=2, ep=2, world_size=4), EngineLayout(2)).digest}


def test_the_digest_tells_models_and_layouts_apart() -> None:
    spec = ModelSpec.from_hf(CONFIGS["qwen3_moe"])
    trainers = [MegatronLayout(), MegatronLayout(tp=2, world_size=2), MegatronLayout(ep=2, world_size=2)]
    plans = [make_plan(spec, trainer, engine) for trainer in trainers for engine in (EngineLayout(), EngineLayout(2))]
    plans.append(make_plan(spec, trainers[0], EngineLayout(), "te"))
    plans.append(make_plan(replace(spec, vocab=spec.vocab + 1), trainers[0], EngineLayout()))
    assert len({plan.digest for plan in plans}) == len(plans)


class TestProof:
    """Layouts that contradict each other never become a plan."""

    @pytest.fixture
    def shards(self) -> tuple[list[dict[str, ShardSpec]], dict[int, dict[str, ShardSpec]]]:
        spec = ModelSpec.from_hf(CONFIGS["llama"])
        trainer = [megatron_params(spec, MegatronLayout(tp=2, world_size=2), rank) for rank in range(2)]
        return trainer, {rank: engine_params(spec, EngineLayout(2), rank) for rank in range(2)}

    def test_an_engine_element_that_nobody_writes(self, shards) -> None:
        trainer, engine = shards
        name = "model.layers.1.mlp.gate_up_proj.weight"
        engine[1][name] = replace(engine[1][name], tiles=engine[1][name].tiles[:1])
        with pytest.raises(AssertionError, match=r"rank 1, model.layers.1.mlp.gate_up_proj.*never written"):
            plan_between(trainer, engine)

    def test_an_engine_element_that_is_written_twice(self, shards) -> None:
        trainer, engine = shards
        shard = engine[0]["model.layers.0.mlp.down_proj.weight"]
        engine[0]["model.layers.0.mlp.down_proj.weight"] = replace(shard, tiles=shard.tiles * 2)
        with pytest.raises(AssertionError, match="overlap"):
            plan_between(trainer, engine)

    def test_a_zero_fill_over_weights(self, shards) -> None:
        trainer, engine = shards
        shard = engine[0]["model.embed_tokens.weight"]
        engine[0]["model.embed_tokens.weight"] = replace(shard, zeros=(Rect(0, 1, 0, 1),))
        with pytest.raises(AssertionError, match="overlap"):
            plan_between(trainer, engine)

    def test_an_engine_tile_outside_its_shard(self, shards) -> None:
        trainer, engine = shards
        (tile,) = engine[0]["model.norm.weight"].tiles
        engine[0]["model.norm.weight"] = ShardSpec((24,), (replace(tile, rect=tile.rect.shift(1, 0)),))
        with pytest.raises(AssertionError, match="reaches out"):
            plan_between(trainer, engine)

    def test_a_trainer_that_lacks_a_tensor(self, shards) -> None:
        trainer, engine = shards
        del trainer[1]["decoder.layers.2.self_attention.linear_qkv.weight"]
        with pytest.raises(AssertionError, match=r"model.layers.2.self_attn.qkv_proj.weight.*never written"):
            plan_between(trainer, engine)

    def test_trainer_ranks_that_hold_overlapping_parts(self, shards) -> None:
        trainer, engine = shards
        name = "decoder.layers.0.mlp.linear_fc2.weight"
        (tile,) = trainer[1][name].tiles
        trainer[1][name] = replace(trainer[1][name], tiles=(replace(tile, hf_rect=tile.hf_rect.shift(0, -1)),))
        with pytest.raises(AssertionError, match=r"overlap"):
            plan_between(trainer, engine)

    def test_a_trainer_tensor_that_the_engine_never_takes(self, shards) -> None:
        trainer, engine = shards
        for rank in engine.values():
            del rank["model.layers.3.input_layernorm.weight"]
        with pytest.raises(AssertionError, match=r"model.layers.3.input_layernorm.weight: the trainer holds 24"):
            plan_between(trainer, engine)

    def test_a_trainer_tile_outside_its_shard(self, shards) -> None:
        trainer, engine = shards
        for rank in trainer:
            tile = Tile(Rect(1, 25, 0, 1), "model.norm.weight", Rect(0, 24, 0, 1))
            rank["decoder.final_layernorm.weight"] = ShardSpec((24,), (tile,))
        with pytest.raises(AssertionError, match="reads"):
            plan_between(trainer, engine)


@pytest.mark.parametrize(
    ("rects", "problem"),
    [
        ([Rect(0, 2, 0, 4), Rect(2, 4, 0, 4)], None),
        ([Rect(0, 4, 0, 1), Rect(0, 2, 1, 4), Rect(2, 4, 1, 4)], None),
        ([Rect(0, 2, 0, 4)], "8 of 16 elements are never written"),
        ([Rect(0, 4, 0, 2), Rect(3, 4, 1, 4)], "overlap"),
        ([Rect(0, 4, 0, 4), Rect(0, 4, 0, 4)], "overlap"),
        ([Rect(0, 5, 0, 4)], "reaches out"),
        ([Rect(1, 1, 0, 4)], "empty"),
        ([], "16 of 16"),
    ],
)
def test_cover_problem_finds_gaps_overlaps_and_overhangs(rects: list[Rect], problem: str | None) -> None:
    found = cover_problem(rects, Rect(0, 4, 0, 4))
    assert found is None if problem is None else problem in str(found)
