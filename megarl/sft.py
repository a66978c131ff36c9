"""The warm start: supervised learning on the task's own problems, before there is anything to reinforce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from megarl.config import OptimizerConfig, RunConfig
from megarl.data.packing import loss_weights, pack_one
from megarl.data.prompts import Task
from megarl.data.renderer import Renderer
from megarl.data.samples import supervised_sample
from megarl.types import TrainBatch, UpdateMetrics

_WARMUP_STEPS = 20
SEED_OFFSET = 1_000_000
"""The warm start sees another stream of problems than the run that follows it."""


class SupervisedTrainer(Protocol):
    """A trainer that can learn from given answers."""

    dp_size: int

    async def supervised_step(self, batch: TrainBatch) -> UpdateMetrics:
        """One optimizer step."""
        ...


def sft_optimizer(config: RunConfig) -> OptimizerConfig:
    """Adam with the warm start's own learning rate, constant after a short warm-up.

    Not annealed: RL goes on from here at a rate of its own.
    """
    changes = {"lr": config.sft.lr, "decay": "constant", "warmup_steps": _WARMUP_STEPS}
    return config.trainer.optimizer.model_copy(update=changes)


async def warm_start(
    trainer: SupervisedTrainer, task: Task, renderer: Renderer, config: RunConfig, report: Callable[[int, float], None]
) -> None:
    """Run ``config.sft.steps`` steps; ``report(step, loss)`` after each. The loss is a mean over answer tokens."""
    for step in range(config.sft.steps):
        batch = _batch(step, task, renderer, config, trainer.dp_size)
        metrics = await trainer.supervised_step(batch)
        report(step + 1, metrics.values["loss"])


def _batch(step: int, task: Task, renderer: Renderer, config: RunConfig, dp_size: int) -> TrainBatch:
    first = step * config.sft.batch_size
    prompts = [task.train(number) for number in range(first, first + config.sft.batch_size)]
    samples = [
        supervised_sample(renderer.render(p.messages), renderer.answer_ids(task.answer_text(p)), p.number)
        for p in prompts
    ]
    weights = loss_weights(samples, "token_mean", config.rollout.max_tokens)
    return pack_one(samples, weights, config.trainer, dp_size=dp_size)
