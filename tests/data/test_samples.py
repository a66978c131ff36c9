from __future__ import annotations

import pytest

from megarl.data.samples import supervised_sample, to_samples
from megarl.types import Prompt, Trajectory, TrajectoryGroup, Turn

PROMPT = Prompt(17, ({"role": "user", "content": "?"},), "1")


def _trajectory(*turns: Turn, status: str = "finished", reward: float | None = 1.0) -> Trajectory:
    return Trajectory(PROMPT, list(turns), "", status=status, reward=reward)  # type: ignore[arg-type]


def _samples(*trajectories: Trajectory):
    return to_samples([TrajectoryGroup(PROMPT, trajectories)])


def test_only_sampled_tokens_carry_loss() -> None:
    (sample,) = _samples(_trajectory(Turn((1, 5), (7, 2), (-0.5, -0.25), version=3, finish_reason="stop")))
    assert sample.token_ids.tolist() == [1, 5, 7, 2]
    assert sample.loss_mask.tolist() == [False, False, True, True]
    assert sample.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25]
    assert (sample.group, sample.version, sample.truncated, sample.num_loss_tokens) == (17, 3, False, 2)


def test_several_turns_are_one_sequence_of_the_oldest_version() -> None:
    first = Turn((1, 5), (7,), (-0.5,), version=4, finish_reason="stop")
    second = Turn((1, 5, 7, 9, 9), (8,), (-0.25,), version=3, finish_reason="stop")
    (sample,) = _samples(_trajectory(first, second))
    assert sample.token_ids.tolist() == [1, 5, 7, 9, 9, 8]
    assert sample.loss_mask.tolist() == [False, False, True, False, False, True]
    assert sample.version == 3


def test_a_rewritten_history_is_refused() -> None:
    first = Turn((1, 5), (7,), (-0.5,), version=0, finish_reason="stop")
    with pytest.raises(AssertionError, match="does not continue"):
        _samples(_trajectory(first, Turn((1, 6, 7), (8,), (-0.5,), version=0, finish_reason="stop")))


def test_invalid_trajectories_are_left_out() -> None:
    empty = Turn((1,), (), (), version=0, finish_reason="abort")
    assert _samples(_trajectory(empty, status="invalid", reward=None)) == []


def test_a_missing_reward_stays_missing() -> None:
    turn = Turn((1,), (2,), (-0.5,), version=0, finish_reason="length")
    (sample,) = _samples(_trajectory(turn, status="truncated", reward=None))
    assert sample.reward is None
    assert sample.truncated


def test_a_supervised_sample_learns_the_answer_only() -> None:
    sample = supervised_sample((1, 2, 3), (4, 5), number=6)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, False, True, True]
    assert sample.group == 6
