"""Live vLLM engines, and a trainer of one rank whose weights are those of a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config import RolloutConfig
from megarl.orchestration.ray_workers import RayCluster, RayWorkers
from megarl.rollout.engine import InFlight, VllmEngines
from megarl.types import Sample, StagedWeights
from megarl.weights.hf_files import ShardReader
from megarl.weights.megatron_layout import MegatronLayout, megatron_params
from megarl.weights.spec import ModelSpec
from megarl.weights.transports.shm import SharedMemory

SEQUENCES = (tuple(range(2, 40)), tuple(range(90, 60, -1)), (5, 5, 5, 7))
SIDE_METHODS = ("receive", "pause", "install", "rollback", "resume")

Shards = dict[str, torch.Tensor]
Change = Callable[[Shards], None]


def rollout(**changes: Any) -> RolloutConfig:
    sizes = {"max_tokens": 16, "max_model_len": 96, "max_num_seqs": 16, "kv_cache_gib": 0.1, "timeout_s": 60.0}
    return RolloutConfig(dtype="fp32", **(sizes | changes))


@dataclass
class Files:
    """A ``PolicyTrainer`` of one rank, as far as a sync needs one: its weights are those of a folder."""

    spec: ModelSpec
    transport: SharedMemory
    oracle: VllmEngines
    """Serves the weights of ``folders["new"]`` as loaded from files; its log-probabilities are the right ones."""
    folders: dict[str, Path]
    which: str = "new"
    change: Change | None = None
    """Spoils the shards before they are sent."""

    async def stage_weights(self, version: int) -> StagedWeights:
        with ShardReader(self.folders[self.which]) as reader:
            params = megatron_params(self.spec, MegatronLayout(), 0)
            shards = {name: reader.read(shard, torch.float32) for name, shard in params.items()}
        if self.change:
            self.change(shards)
        written = self.transport.writer(0).write(version, shards)
        return StagedWeights(tuple(self.transport.content_digests(written.checksums)), written.num_bytes)

    async def score(self, samples: Sequence[Sample], *, temperature: Any = None, reference: bool = False) -> Any:
        scores = await self.oracle.score([tuple(map(int, sample.token_ids)) for sample in samples])
        return [np.asarray([0.0, *one], dtype=np.float32) for one in scores]


async def start(
    cluster: RayCluster,
    config: RolloutConfig,
    folder: Path,
    logs: Path,
    target: str,
    name: str,
    in_flight: InFlight = "wait",
) -> tuple[VllmEngines, RayWorkers]:
    """One engine that serves the weights of ``folder`` as version 0."""
    size = config.tensor_parallel
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    args = (config, folder, 0, in_flight != "wait")
    workers = await cluster.workers(
        name, target, [args] * size, env=[env] * size, log_folder=logs, side_methods=SIDE_METHODS
    )
    engines = VllmEngines(workers, config, in_flight)
    await engines.setup()
    return engines, workers
