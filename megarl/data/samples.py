"""Trajectories to trained sequences. Tokens are those the engine saw and sampled; nothing is tokenised again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megarl.types import Sample, Trajectory, TrajectoryGroup


def to_samples(groups: Iterable[TrajectoryGroup]) -> list[Sample]:
    """One sample per valid trajectory, in order. Invalid ones were counted by the rollouter and are left out."""
    return [to_sample(t) for group in groups for t in group.trajectories if t.status != "invalid"]


def to_sample(trajectory: Trajectory) -> Sample:
    """The token sequence of the last turn's prompt and completion, with every sampled token marked.

    An earlier turn's tokens must stand unchanged at the start of the later prompt: that is what the engine was shown.
    """
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for turn in trajectory.turns:
        assert list(turn.prompt_ids[: len(ids)]) == ids, "a later prompt does not continue the earlier turn"
        added = len(turn.prompt_ids) - len(ids)
        ids += [*turn.prompt_ids[len(ids) :], *turn.completion_ids]
        mask += [False] * added + [True] * len(turn.completion_ids)
        logprobs += [0.0] * added + list(turn.rollout_logprobs)
    return Sample(
        token_ids=np.asarray(ids, dtype=np.int32),
        loss_mask=np.asarray(mask, dtype=bool),
        rollout_logprobs=np.asarray(logprobs, dtype=np.float32),
        group=trajectory.prompt.number,
        version=min(turn.version for turn in trajectory.turns),
        reward=trajectory.reward,
        truncated=trajectory.status == "truncated",
    )


def supervised_sample(prompt_ids: Sequence[int], answer_ids: Sequence[int], number: int) -> Sample:
    """A sequence whose answer is to be learnt."""
    return Sample(
        token_ids=np.asarray([*prompt_ids, *answer_ids], dtype=np.int32),
        loss_mask=np.asarray([False] * len(prompt_ids) + [True] * len(answer_ids), dtype=bool),
        rollout_logprobs=np.zeros(len(prompt_ids) + len(answer_ids), dtype=np.float32),
        group=number,
        version=0,
        reward=None,
    )
