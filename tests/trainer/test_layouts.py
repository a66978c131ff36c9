"""Every parallel layout computes what one rank computes, and what transformers computes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import AlgorithmConfig, ParallelConfig, PrecisionConfig, TrainerConfig
from megarl.data.packing import loss_weights, pack_one
from megarl.orchestration.ray_workers import RayCluster, RayWorkers
from megarl.trainer.settings import WorkerSettings
from megarl.trainer.trainer import mean_of_sums
from megarl.types import MicroBatch, Sample
from tests.trainer.families import FAMILIES, MOE_FAMILIES, VOCAB, logits_of, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = 4
DENSE_LAYOUTS = ({}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 4, "pipeline_layout": "E|tt|tt|L"})
MOE_LAYOUTS = ({"ep": 2}, {"tp": 2, "ep": 2})
TRAINING_LAYOUTS = (
    {"tp": 2, "pp": 2},
    {"pp": 2, "ep": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "etp": 2},
    {"tp": 4},  # of two key heads
    {"ep": 2, "etp": 2},
    {"tp": 2, "pp": 2, "vpp": 2},
    {"pp": 2, "first_stage_layers": 1, "ep": 2},
    {"tp": 2, "pp": 2, "vpp": 2, "pipeline_layout": "Ett|t|t|L"},
)
"""Parallel sizes; what is left of four ranks is data parallel."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("models")
    return {family: (root / family, write_model(family, root / family)) for family in FAMILIES}


async def _start(cluster: RayCluster, size: int, logs: Path) -> RayWorkers:
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return await cluster.workers(
        f"layouts{size}", "tests.trainer.ranks:LayoutRanks", [()] * size, env=[env] * size, log_folder=logs
    )


async def _ask(workers: RayWorkers, method: str, settings: WorkerSettings, micro_batches: Any) -> list[Any]:
    ports = await workers.call("free_port", timeout_s=60)
    return await workers.call(method, settings, micro_batches, ports[0], timeout_s=60)


@pytest.fixture(scope="module")
async def ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[int, RayWorkers]]:
    logs = tmp_path_factory.mktemp("logs")
    with RayCluster() as cluster:
        yield {size: await _start(cluster, size, logs) for size in (1, RANKS)}


def _settings(model: Path, world_size: int, layout: dict[str, Any], *, budget: int = 64) -> WorkerSettings:
    parallel = ParallelConfig(world_size=world_size, **layout)
    trainer = TrainerConfig(
        model=model, parallel=parallel, precision=PrecisionConfig(recipe="fp32"), max_tokens_per_micro_batch=budget
    )
    return WorkerSettings(trainer, AlgorithmConfig(entropy_coef=0.01), temperature=0.8, seed=0, max_steps=10)


@pytest.mark.parametrize("family", FAMILIES)
async def test_logits_equal_transformers_in_every_layout(family, models, ranks):
    folder, model = models[family]
    ids = np.arange(3, 43) * 3 % VOCAB
    zeros = np.zeros(len(ids), dtype=np.float32)
    batch = MicroBatch(ids, np.arange(len(ids)), ids, np.array([0, len(ids)]), zeros, zeros, zeros)
    expected = logits_of(model, ids)
    for layout in DENSE_LAYOUTS + (MOE_LAYOUTS if family in MOE_FAMILIES else ()):
        settings = _settings(folder, RANKS, layout)
        batches = [[batch] * layout.get("vpp", 1)] * RANKS  # interleaved schedules want as many as stages
        found = [x for x in await _ask(ranks[RANKS], "logits", settings, batches) if x is not None]
        assert len(found) == 1
        assert np.abs(found[0] - expected).max() < 1e-4, layout


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(1.0, 1.0), (1.0, 0.0), (0.7, 1.0)])
async def test_stretched_rotary_embeddings_are_those_of_transformers(mscale, mscale_all_dim, ranks, tmp_path):
    """YaRN, beyond the positions that a model was first made for."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"beta_fast": 32, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale_all_dim}
    model = write_model("deepseek_v3", tmp_path, rope_parameters=rope)
    ids = np.arange(3, 103) * 3 % VOCAB
    zeros = np.zeros(len(ids), dtype=np.float32)
    batch = MicroBatch(ids, np.arange(len(ids)), ids, np.array([0, len(ids)]), zeros, zeros, zeros)
    (found,) = await _ask(ranks[1], "logits", _settings(tmp_path, 1, {}, budget=128), [[batch]])
    assert np.abs(found - logits_of(model, ids)).max() < 1e-4


@pytest.mark.parametrize("family", MOE_FAMILIES)
async def test_loss_and_gradients_equal_one_rank(family, models, ranks):
    folder, _ = models[family]
    one = await _gradients(ranks[1], _settings(folder, 1, {}))
    for layout in TRAINING_LAYOUTS:
        many = await _gradients(ranks[RANKS], _settings(folder, RANKS, layout))
        assert many[0] == pytest.approx(one[0], rel=1e-5, abs=1e-7), layout
        assert many[1].keys() == one[1].keys()
        for name, expected in one[1].items():
            scale = max(np.abs(expected).max(), 1e-3)
            assert np.abs(many[1][name] - expected).max() / scale < 1e-4, (layout, name)


async def test_a_packed_batch_has_the_loss_of_its_samples_one_by_one(models, ranks):
    folder, _ = models["qwen3_moe"]
    packed, single = [await _gradients(ranks[1], _settings(folder, 1, {}, budget=budget)) for budget in (512, 1)]
    assert packed[0]["loss"] == pytest.approx(single[0]["loss"], abs=1e-6)
    for name, expected in single[1].items():
        np.testing.assert_allclose(packed[1][name], expected, atol=1e-6, err_msg=name)


async def _gradients(workers: RayWorkers, settings: WorkerSettings) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """(reduced metrics, whole gradients by Hugging Face name)."""
    samples = _samples()
    sizes = settings.trainer.parallel
    batch = pack_one(samples, loss_weights(samples, "token_mean", 16), settings.trainer, dp_size=sizes.dp)
    answers = await _ask(workers, "gradients", settings, batch.micro_batches)
    metrics = mean_of_sums([sums for reports, _ in answers for sums in reports])
    whole: dict[str, dict[Any, np.ndarray]] = {}
    for _, pieces in answers:
        for name, rect, part in pieces:
            known = whole.setdefault(name, {}).setdefault(rect, part)
            np.testing.assert_allclose(part, known, rtol=1e-4, atol=1e-6, err_msg=f"replicas of {name} differ")
    return metrics, {name: _assembled(parts) for name, parts in whole.items()}


def _assembled(parts: dict[Any, np.ndarray]) -> np.ndarray:
    result = np.full((max(r.row1 for r in parts), max(r.col1 for r in parts)), np.nan)
    for rect, part in parts.items():
        result[rect.row0 : rect.row1, rect.col0 : rect.col1] = part
    return result


def _samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for number in range(12):
        length, prompt = int(rng.integers(6, 20)), int(rng.integers(2, 5))
        mask = np.arange(length) >= prompt
        samples.append(
            Sample(
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                group=number // 4,
                version=0,
                reward=1.0,
                advantage=float(rng.normal()),
            )
        )
    return samples
