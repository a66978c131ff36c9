from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from megarl.algorithms.algorithm import PolicyGradient, assign_advantages
from megarl.config import AlgorithmConfig
from megarl.types import Sample


def _sample(group: int, reward: float | None, *, truncated: bool = False) -> Sample:
    return Sample(
        token_ids=np.arange(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        rollout_logprobs=np.zeros(3, dtype=np.float32),
        group=group,
        version=0,
        reward=reward,
        truncated=truncated,
    )


def _config(**changes: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(changes)


class Scorer:
    """Scores a sample by its group, and notes what it was asked for."""

    dp_size = 1

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], bool]] = []

    async def score(self, samples: Sequence[Sample], *, temperature=None, reference: bool = False) -> list[np.ndarray]:
        self.calls.append(([sample.group for sample in samples], reference))
        return [np.full(3, float(sample.group), dtype=np.float32) for sample in samples]


def test_groups_go_by_prompt_number_whatever_the_order() -> None:
    samples = [_sample(1, 1.0), _sample(2, 0.0), _sample(1, 0.0), _sample(2, 4.0)]
    assign_advantages(samples, _config(name="dr_grpo"))
    assert [sample.advantage for sample in samples] == [0.5, -2.0, -0.5, 2.0]


@pytest.mark.parametrize(("choice", "in_loss"), [("drop", False), ("keep", True)])
def test_groups_without_spread_are_dropped_or_kept_with_advantage_zero(choice: str, in_loss: bool) -> None:
    samples = [_sample(1, 1.0), _sample(1, 1.0), _sample(2, 0.0), _sample(2, 1.0)]
    assign_advantages(samples, _config(zero_spread=choice))
    assert [sample.in_loss for sample in samples] == [in_loss, in_loss, True, True]
    assert [sample.advantage for sample in samples[:2]] == [0.0, 0.0]


def test_reinforce_drops_nothing_for_its_spread() -> None:
    samples = [_sample(1, 1.0)]
    assign_advantages(samples, _config(name="reinforce"))
    assert samples[0].in_loss
    assert samples[0].advantage == 1.0


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_missing_reward_leaves_the_loss(missing: float | None) -> None:
    samples = [_sample(1, 1.0), _sample(1, missing), _sample(1, 0.0)]
    assign_advantages(samples, _config(name="dr_grpo", zero_spread="keep"))
    assert [sample.in_loss for sample in samples] == [True, False, True]
    assert [sample.advantage for sample in samples] == [0.5, 0.0, -0.5]


@pytest.mark.parametrize(("choice", "in_loss"), [("keep", True), ("mask", False)])
def test_a_truncated_sample_keeps_its_reward_in_the_baseline(choice: str, in_loss: bool) -> None:
    samples = [_sample(1, 0.0, truncated=True), _sample(1, 1.0)]
    assign_advantages(samples, _config(name="dr_grpo", truncated=choice))
    assert [sample.in_loss for sample in samples] == [in_loss, True]
    assert samples[1].advantage == 0.5


async def test_one_update_scores_nothing() -> None:
    scorer, samples = Scorer(), [_sample(1, 0.0), _sample(1, 1.0)]
    await PolicyGradient(_config()).prepare(samples, scorer)
    assert scorer.calls == []
    assert samples[0].old_logprobs is None


async def test_only_what_is_trained_is_scored() -> None:
    scorer = Scorer()
    samples = [_sample(1, 1.0), _sample(1, 1.0), _sample(2, 0.0), _sample(2, 1.0)]
    await PolicyGradient(_config(updates_per_step=2, kl={"coef": 0.1})).prepare(samples, scorer)
    assert scorer.calls == [([2, 2], False), ([2, 2], True)]
    assert samples[0].old_logprobs is samples[0].ref_logprobs is None
    assert samples[2].old_logprobs is not None
    assert samples[2].ref_logprobs is not None


async def test_a_step_without_spread_scores_nothing() -> None:
    scorer = Scorer()
    await PolicyGradient(_config(updates_per_step=2)).prepare([_sample(1, 1.0), _sample(1, 1.0)], scorer)
    assert scorer.calls == []
