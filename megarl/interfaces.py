"""Who does what: the Protocols between the parts of megarl.

Every implementation is chosen and built in ``build.py``; the loop sees only these.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megarl.types import (
    EngineStatus,
    EvalReport,
    GenerateRequest,
    LoopState,
    Prompt,
    Sample,
    StagedWeights,
    SyncReport,
    TrainBatch,
    Trajectory,
    TrajectoryGroup,
    Turn,
    UpdateMetrics,
)


class Workers(Protocol):
    """A group of processes, one per rank, that run methods of one class.

    A call raises ``WorkerFailed`` when a rank raises or dies, and ``TimeoutError`` naming the group, the method
    and the seconds when the deadline passes.
    """

    name: str
    size: int

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Run ``method(*args)`` on every rank; results in rank order."""
        ...

    async def call_each(self, method: str, args: Sequence[tuple[Any, ...]], *, timeout_s: float) -> list[Any]:
        """Run ``method(*args[rank])`` on every rank; results in rank order."""
        ...


class PolicyTrainer(Protocol):
    """Owns the true weights."""

    dp_size: int

    async def score(
        self, samples: Sequence[Sample], *, temperature: float | None = None, reference: bool = False
    ) -> list[np.ndarray]:
        """Log-probability of every token given the ones before it, fp32 [L] per sample, 0 at token 0.

        ``temperature`` None is the one that rollouts are sampled with. ``reference`` asks the frozen reference policy.
        """
        ...

    async def train_step(self, batch: TrainBatch) -> UpdateMetrics:
        """One optimizer step."""
        ...

    async def stage_weights(self, version: int) -> StagedWeights:
        """Send every shard through the transport under ``version``, while the engines ``receive``."""
        ...

    async def save(self, folder: Path) -> None:
        """Write model, optimizer, scheduler and RNG state below ``folder``."""
        ...

    async def load(self, folder: Path) -> None:
        """Read what ``save`` wrote."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the weights as Hugging Face safetensors below ``folder``."""
        ...


class RolloutEngine(Protocol):
    """Samples from a copy of the weights that carries a version."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Turn]:
        """One turn per request, in order. The whole list is enqueued at once, so results repeat exactly."""
        ...

    async def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Log-probability of every token but the first given the ones before it."""
        ...

    async def receive(self, version: int) -> list[EngineStatus]:
        """Take the weights being staged and check them while generation goes on; one status per engine rank."""
        ...

    async def pause(self) -> None:
        """Sample no more; returns when nothing is computed. What happens to running requests is configured."""
        ...

    async def install(self, version: int) -> list[EngineStatus]:
        """Put the staged weights in place, keeping what is needed to undo it. Never raises for a rank's failure."""
        ...

    async def rollback(self) -> list[EngineStatus]:
        """Undo the last ``install`` bit for bit."""
        ...

    async def resume(self, version: int) -> None:
        """Serve ``version`` from now on: drop the undo, reset the prefix cache, go on."""
        ...


class Env(Protocol):
    """Turns a prompt into finished trajectories, by any number of engine turns."""

    async def run(self, prompts: Sequence[Prompt], *, step: int, group_size: int) -> list[TrajectoryGroup]:
        """``group_size`` attempts at every prompt, unscored."""
        ...


class RewardFn(Protocol):
    """Scores one trajectory. Model output is hostile input: no eval, bounded time."""

    def __call__(self, trajectory: Trajectory, /) -> float | None:
        """The reward, or None when it could not be computed."""
        ...


class WeightSync(Protocol):
    """Publishes the trainer's weights to every engine as one version, or not at all."""

    async def sync(self, version: int, *, expect_change: bool = False) -> SyncReport:
        """Publish. With ``expect_change`` weights that are those of the last sync are a failure.

        Raises ``SyncFailed`` when the new version cannot be proven; engines then keep serving the old one.
        """
        ...


class Placement(Protocol):
    """Who has the accelerators when."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """While inside, the trainer may use them. Colocated engines sleep."""
        ...


class Rollouter(Protocol):
    """Prompts to scored groups, into the buffer."""

    def running(self, prompts_done: int) -> AbstractAsyncContextManager[None]:
        """While inside, groups are produced, starting with prompt number ``prompts_done``."""
        ...


class Buffer(Protocol):
    """Bounded queue of finished groups in strict prompt order: the one owner of staleness."""

    async def take(self, count: int) -> list[TrajectoryGroup]:
        """The next ``count`` groups in prompt order."""
        ...

    async def release(self, count: int) -> None:
        """Free the slots of ``count`` groups, so that newer prompts may start."""
        ...


class Evaluator(Protocol):
    """Held-out accuracy."""

    async def maybe_run(self, step: int) -> EvalReport | None:
        """Evaluate when the schedule says so."""
        ...

    async def run(self, step: int) -> EvalReport:
        """Evaluate now."""
        ...


class Recovery(Protocol):
    """Committed checkpoints of the whole run."""

    async def restore(self, trainer: PolicyTrainer) -> LoopState:
        """Load the newest committed checkpoint into ``trainer``, or return a fresh state."""
        ...

    async def maybe_save(self, trainer: PolicyTrainer, state: LoopState) -> None:
        """Commit a checkpoint when the schedule says so."""
        ...


class Tracker(Protocol):
    """Records a run. A tracking problem is a warning, never the end of a run."""

    @property
    def run_id(self) -> str:
        """The tracker's own name of this run, which a resumed run is given; empty while there is none."""
        ...

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Record metrics of one step."""
        ...

    def log_rollouts(self, groups: Sequence[TrajectoryGroup], *, step: int) -> None:
        """Record a few sampled rollouts as a table."""
        ...

    def log_file(self, path: Path) -> None:
        """Attach a file to the run."""
        ...

    def close(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED."""
        ...
