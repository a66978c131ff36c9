"""A small model between two trainer ranks and two engine ranks, for the tests of the transports."""

from __future__ import annotations

import numpy as np
import torch

from megarl.weights.engine_layout import EngineLayout
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
from megarl.weights.transports.transport import Cargo
from tests.weights.models import CONFIGS, numbered_weights
from tests.weights.sharders import engine_shards, megatron_shards

CONFIG = CONFIGS["glm4_moe"]
SPEC = ModelSpec.from_hf(CONFIG)
TRAINER, ENGINE = MegatronLayout(tp=2, ep=2, world_size=2), EngineLayout(2)
RANKS = 2


def cargo(replicas: int = 1) -> Cargo:
    """In bf16, but for the router, which the engine keeps in fp32."""
    return Cargo(make_plan(SPEC, TRAINER, ENGINE, replicas=replicas), "bf16")


def _weights(seed: int) -> dict[str, np.ndarray]:
    """Numbers that bf16 holds exactly."""
    return {name: (value * 7 + seed) % 251 for name, value in numbered_weights(SPEC).items()}


def live_shards(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The live shards of both trainer ranks; every ``seed`` is another version of them."""
    return [
        {name: torch.from_numpy(np.ascontiguousarray(value)).float() for name, value in rank.items()}
        for rank in megatron_shards(CONFIG, _weights(seed), TRAINER, "local")
    ]


def expected_shards(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """What both engine ranks must hold."""
    moved = cargo()
    return [
        {name: torch.from_numpy(np.ascontiguousarray(value)).to(moved.dtype_of(name)) for name, value in rank.items()}
        for rank in engine_shards(CONFIG, _weights(seed), 2, expert_parallel=False)
    ]
