"""Advantages of one group of attempts at the same prompt: one function per paper.

Each takes the rewards of a group, all finite, in float64 (Python floats), and returns as many advantages. What has no
reward never gets here: ``group_advantages`` takes it out. Under the group-relative estimators a group of equal rewards
gives exactly 0.0; so does a group of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeGuard

Estimator = Callable[[Sequence[float]], list[float]]

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that a tiny spread does not blow up."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """(r_i - mean) / (std + 1e-6), std with ddof 1. GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2."""
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    centred = dr_grpo(rewards)
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + STD_EPSILON) for c in centred]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r_i - mean. Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2.

    Without the division GRPO's bias to easy and hard prompts is gone.
    The paper divides the loss by a constant too: ``algorithm.loss=constant``.
    """
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r_i - mean of the others. RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), equation 8.

    The others are averaged directly: taking r_i out of the total would cancel digits.
    """
    if _all_equal(rewards):
        return [0.0] * len(rewards)
    others = [[*rewards[:i], *rewards[i + 1 :]] for i in range(len(rewards))]
    return [r - math.fsum(rest) / len(rest) for r, rest in zip(rewards, others, strict=True)]


def reinforce(rewards: Sequence[float]) -> list[float]:
    """r_i. REINFORCE without a baseline, Williams 1992, equation 4; siblings are not compared."""
    return list(rewards)


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce": reinforce}

GROUP_RELATIVE = frozenset({"grpo", "dr_grpo", "rloo"})
"""Estimators that compare siblings; without a spread of rewards they have nothing to say."""


def group_advantages(name: str, rewards: Sequence[float | None]) -> list[float | None]:
    """Advantages under estimator ``name``; None where the reward is None or not finite.

    Such attempts have no part in the statistics of the others.
    """
    known = [r for r in rewards if has_reward(r)]
    advantages = iter(ESTIMATORS[name](known))
    return [next(advantages) if has_reward(r) else None for r in rewards]


def zero_spread(rewards: Sequence[float | None]) -> bool:
    """Whether all rewards that could be computed are equal."""
    return _all_equal([r for r in rewards if has_reward(r)])


def has_reward(reward: float | None) -> TypeGuard[float]:
    """Whether a reward was computed and is finite."""
    return reward is not None and math.isfinite(reward)


def _all_equal(rewards: Sequence[float]) -> bool:
    return all(r == rewards[0] for r in rewards)
