"""Real Megatron ranks into real vLLM engines: every sync is proven by log-probabilities, over every transport."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import (
    AlgorithmConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RolloutConfig,
    TrainerConfig,
    WeightsConfig,
)
from megarl.data.packing import loss_weights, pack_one
from megarl.orchestration.ray_workers import RayCluster
from megarl.ports import free_port
from megarl.rollout.engine import VllmEngines
from megarl.trainer.settings import WorkerSettings, layout_of
from megarl.trainer.trainer import MegatronTrainer
from megarl.types import Sample
from megarl.weights.engine_layout import engine_layout_of
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
from megarl.weights.sync import BridgeSync, ProbeRule
from megarl.weights.transports.disk import Disk
from megarl.weights.transports.p2p import PointToPoint
from megarl.weights.transports.shm import SharedMemory
from megarl.weights.transports.transport import Cargo, Transport
from tests.rollout.live_engines import SEQUENCES, SIDE_METHODS, rollout
from tests.trainer.families import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
CASES: dict[str, tuple[str, ParallelConfig, RolloutConfig, str]] = {
    "TP 2, PP 2, EP 2 on 8 ranks to EP 2": (
        "glm4_moe",
        ParallelConfig(world_size=8, tp=2, pp=2, ep=2),
        rollout(tensor_parallel=2, expert_parallel=True),
        "shm",
    ),
    "TP 2, PP 2, VPP 2 to one rank": (
        "deepseek_v3",
        ParallelConfig(world_size=4, tp=2, pp=2, vpp=2),
        rollout(),
        "p2p",
    ),
    "ETP 2, EP 2, an uneven PP 2 to TP 4 with shared key heads": (
        "qwen3_moe",
        ParallelConfig(world_size=8, tp=2, pp=2, ep=2, etp=2, first_stage_layers=1),
        rollout(tensor_parallel=4, expert_parallel=True),
        "disk",
    ),
    "a tied head, PP 2 to two engines of TP 1": (
        "qwen2",
        ParallelConfig(world_size=2, pp=2, pipeline_layout="Et|tttL"),
        rollout(replicas=2),
        "p2p",
    ),
}


def _transport(kind: str, cargo: Cargo, folder: Path, sizes: ParallelConfig, engine: RolloutConfig) -> Transport:
    if kind == "shm":
        return SharedMemory(f"test-bridge-{os.getpid()}", cargo)
    if kind == "disk":
        return Disk(folder, cargo)
    return PointToPoint(f"127.0.0.1:{free_port()}", cargo, sizes.world_size, engine.tensor_parallel, 60.0)


def _samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for number in range(8):
        mask = np.arange(14) >= 4
        samples.append(
            Sample(
                token_ids=rng.integers(0, VOCAB, 14).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
                group=number // 4,
                version=0,
                reward=1.0,
                advantage=float(rng.normal()),
            )
        )
    return samples


async def _run(cluster: RayCluster, case: str, root: Path) -> dict[str, Any]:
    family, sizes, engine, kind = CASES[case]
    write_model(family, root / "model")
    config = TrainerConfig(
        model=root / "model",
        parallel=sizes,
        precision=PrecisionConfig(recipe="fp32"),
        optimizer=OptimizerConfig(lr=1e-3),
        max_tokens_per_micro_batch=64,
    )
    settings = WorkerSettings(config, AlgorithmConfig(), temperature=1.0, seed=0, max_steps=10)
    size, ranks = sizes.world_size, engine.replicas * engine.tensor_parallel
    trainer_ranks, engine_ranks = await asyncio.gather(
        cluster.workers(
            "trainer",
            "megarl.trainer.worker:TrainerWorker",
            [(settings,)] * size,
            env=[ENV] * size,
            log_folder=root / "logs",
        ),
        cluster.workers(
            "engine",
            "megarl.rollout.vllm_engine:VllmWorker",
            [(engine, root / "model")] * ranks,
            env=[ENV] * ranks,
            log_folder=root / "logs",
            side_methods=SIDE_METHODS,
        ),
    )
    trainer, engines = MegatronTrainer(trainer_ranks, config), VllmEngines(engine_ranks, engine)
    await asyncio.gather(trainer.setup(), engines.setup())
    replicas = engine.replicas if kind == "p2p" else 1
    spec = ModelSpec.from_folder(root / "model")
    plan = make_plan(spec, layout_of(sizes), engine_layout_of(engine), replicas=replicas)
    transport = _transport(kind, Cargo(plan, "fp32"), root / "weights", sizes, engine)
    with transport.opened():
        await asyncio.gather(trainer.attach(transport), engines.attach(transport))
        sync = BridgeSync(
            trainer,
            engines,
            WeightsConfig(),
            plan_digest=plan.digest,
            lower_bound_bytes=sum(plan.num_bytes(rank, 4) for rank in range(len(plan.shapes))),
            probe_sequences=SEQUENCES,
            probe_rule=ProbeRule("largest", 1e-4),
        )
        return await _train_and_sync(trainer, engines, sync, config)


async def _train_and_sync(
    trainer: MegatronTrainer, engines: VllmEngines, sync: BridgeSync, config: TrainerConfig
) -> dict[str, Any]:
    found: dict[str, Any] = {"reports": [await sync.sync(0)], "scores": [await engines.score(SEQUENCES)]}
    found["reports"].append(await sync.sync(1))
    found["scores"].append(await engines.score(SEQUENCES))
    samples = _samples()
    batch = pack_one(samples, loss_weights(samples, "token_mean", 16), config, dp_size=trainer.dp_size)
    update = await trainer.train_step(batch)
    found["moved"] = update.moved
    found["reports"].append(await sync.sync(2, expect_change=True))
    found["scores"].append(await engines.score(SEQUENCES))
    return found


@pytest.mark.parametrize("case", CASES)
def test_engines_compute_what_the_trainer_computes_after_every_sync(case: str, tmp_path: Path) -> None:
    with asyncio.Runner() as runner, RayCluster() as cluster:
        found = runner.run(_run(cluster, case, tmp_path))
    assert all(report.probe_max_diff < 1e-4 for report in found["reports"])
    assert all(report.bytes_moved <= 1.05 * report.lower_bound_bytes for report in found["reports"])
    first, unchanged, trained = found["scores"]
    assert unchanged == first
    assert found["moved"]
    assert trained != first
