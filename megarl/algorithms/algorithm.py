"""Policy gradient over groups: from rewards to advantages, and what must be scored before the first update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megarl.algorithms.advantages import GROUP_RELATIVE, group_advantages, zero_spread
from megarl.config import AlgorithmConfig
from megarl.interfaces import PolicyTrainer
from megarl.types import Sample


class PolicyGradient:
    """GRPO, Dr. GRPO, RLOO and REINFORCE; they differ in one function of ``advantages.py``."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config

    async def prepare(self, samples: Sequence[Sample], trainer: PolicyTrainer) -> None:
        """Assign advantages, take samples out of the loss, and score those that stay, all in place.

        ``old_logprobs`` are scored only when a step makes several updates: with one, the current log-probabilities
        are the old ones. ``ref_logprobs`` are scored only under a KL penalty.
        """
        assign_advantages(samples, self._config)
        trained = [sample for sample in samples if sample.in_loss]
        if not trained:
            return
        if self._config.updates_per_step > 1:
            for sample, logprobs in zip(trained, await trainer.score(trained), strict=True):
                sample.old_logprobs = logprobs
        if self._config.kl.coef > 0:
            for sample, logprobs in zip(trained, await trainer.score(trained, reference=True), strict=True):
                sample.ref_logprobs = logprobs


def assign_advantages(samples: Sequence[Sample], config: AlgorithmConfig) -> None:
    """Set ``advantage`` and ``in_loss`` of every sample. Groups go by prompt number, in whatever order they come."""
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    for group in groups.values():
        _assign_group(group, config)


def _assign_group(group: Sequence[Sample], config: AlgorithmConfig) -> None:
    rewards = [sample.reward for sample in group]
    dropped = config.zero_spread == "drop" and config.name in GROUP_RELATIVE and zero_spread(rewards)
    for sample, advantage in zip(group, group_advantages(config.name, rewards), strict=True):
        masked = sample.truncated and config.truncated == "mask"
        sample.advantage = 0.0 if advantage is None else advantage
        sample.in_loss = advantage is not None and not dropped and not masked
