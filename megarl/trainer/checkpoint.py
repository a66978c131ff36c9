"""A trainer's checkpoint: Megatron's dist_checkpointing for what is sharded, a small file per rank for its RNG.

The state is written in a form that does not depend on the layout, so a run may go on with other parallel sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl.trainer.model import bare

_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,  # one form for EP 1 and EP > 1
}
_log = logging.getLogger(__name__)


def save(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    rank: int,
) -> None:
    """Write this rank's share below ``folder``; a collective call."""
    state = _sharded_state(chunks, optimizer, is_loading=False)
    state["scheduler"] = scheduler.state_dict()
    (folder / "megatron").mkdir(parents=True, exist_ok=True)
    (folder / "rng").mkdir(exist_ok=True)
    dist_checkpointing.save(state, str(folder / "megatron"))
    rng = {"torch": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    torch.save(rng, _rng_file(folder, rank))
    torch.distributed.barrier()


def load(
    folder: Path,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    rank: int,
) -> None:
    """Read this rank's share of what ``save`` wrote, under this or another layout; a collective call."""
    state = dist_checkpointing.load(_sharded_state(chunks, optimizer, is_loading=True), str(folder / "megatron"))
    for name, chunk in _names(chunks).items():
        bare(chunk).load_state_dict(state[name])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    _load_rng(folder, rank)


def _load_rng(folder: Path, rank: int) -> None:
    ranks_saved = len(list((folder / "rng").glob("*.pt")))
    if ranks_saved != torch.distributed.get_world_size():
        _log.warning(
            "%d ranks saved their random state, %d load: it starts anew",
            ranks_saved,
            torch.distributed.get_world_size(),
        )
        return
    rng = torch.load(_rng_file(folder, rank), weights_only=True)
    torch.set_rng_state(rng["torch"])
    get_cuda_rng_tracker().set_states(rng["megatron"])


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / "rng" / f"rank-{rank:05d}.pt"


def _sharded_state(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, *, is_loading: bool
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, chunk in _names(chunks).items():
        inner: Any = bare(chunk)
        state[name] = inner.sharded_state_dict(metadata=_METADATA)
    model_state = state if len(chunks) > 1 else state["model"]  # as Megatron's optimizer expects them
    state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=_METADATA)
    return state


def _names(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Chunks by Megatron's name for their part of a checkpoint."""
    return {"model" if len(chunks) == 1 else f"model{number}": chunk for number, chunk in enumerate(chunks)}
