"""What the driver tells a trainer rank; imports no Megatron, so that the driver needs none."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import AlgorithmConfig, ParallelConfig, TrainerConfig
from megarl.weights.megatron_layout import MegatronLayout


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """All a trainer rank needs to know."""

    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    temperature: float
    seed: int
    max_steps: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""


def layout_of(sizes: ParallelConfig) -> MegatronLayout:
    """The weight layout that goes with the parallel sizes."""
    return MegatronLayout(**sizes.model_dump())
