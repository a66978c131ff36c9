"""The main loop: in which order things happen. Everything else answers one line of ``train``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.config import RunConfig
from megarl.data.packing import pack
from megarl.data.samples import to_samples
from megarl.interfaces import Buffer, Evaluator, Placement, PolicyTrainer, Recovery, Rollouter, Tracker, WeightSync
from megarl.timing import StepTimer
from megarl.tracking.tracker import step_metrics
from megarl.types import LoopState, Sample


class Algorithm(Protocol):
    """How rewards become advantages, and what has to be scored first."""

    async def prepare(self, samples: Sequence[Sample], trainer: PolicyTrainer) -> None:
        """Score what the loss needs (old, reference log-probabilities) and assign advantages, in place."""
        ...


@dataclass(frozen=True, slots=True)
class System:
    """Everything a run consists of; put together in ``build.py``."""

    trainer: PolicyTrainer
    rollouter: Rollouter
    buffer: Buffer
    algorithm: Algorithm
    weights: WeightSync
    placement: Placement
    evaluator: Evaluator
    recovery: Recovery
    tracker: Tracker


async def train(system: System, config: RunConfig) -> LoopState:
    """Run ``config.max_steps`` steps. Sync and async differ only in ``config.max_staleness``."""
    state = await system.recovery.restore(system.trainer)
    await system.weights.sync(version=state.step)  # nothing is ever sampled unversioned
    await system.evaluator.maybe_run(state.step)
    timer = StepTimer()

    async with system.rollouter.running(state.prompts_done):  # prompts -> scored groups -> buffer
        while state.step < config.max_steps:
            with timer.phase("generate"):
                groups = await system.buffer.take(config.prompts_per_step)
            async with system.placement.training():  # colocated: engines sleep; else nothing
                samples = to_samples(groups)
                with timer.phase("score"):
                    await system.algorithm.prepare(samples, system.trainer)
                with timer.phase("train"):
                    updates = [
                        await system.trainer.train_step(batch)
                        for batch in pack(samples, config, dp_size=system.trainer.dp_size)
                    ]
            state.advance(groups)
            with timer.phase("sync"):
                moved = any(update.moved for update in updates)
                report = await system.weights.sync(version=state.step, expect_change=moved)
            await system.buffer.release(len(groups))  # only now may newer prompts start
            system.tracker.log(step_metrics(groups, samples, updates, report, timer.lap()), step=state.step)
            system.tracker.log_rollouts(groups, step=state.step)
            with timer.phase("evaluate"):  # counted in the next step, like the checkpoint
                await system.evaluator.maybe_run(state.step)
            with timer.phase("save"):
                state.tracker_run = system.tracker.run_id
                await system.recovery.maybe_save(system.trainer, state)
    return state
