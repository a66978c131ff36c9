"""Sampled rollouts as rows of a table, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Any

from megarl.config import TrackingConfig
from megarl.types import Trajectory, TrajectoryGroup


def rollout_rows(groups: Sequence[TrajectoryGroup], *, step: int, config: TrackingConfig) -> list[dict[str, Any]]:
    """The rows to record at ``step``: none when none are due.

    Takes the first attempt at every prompt, then the second, ..., so that what is shown is not chosen by its reward.

    Example: ``[{"step": 10, "prompt_number": 640, "attempt": 0, "prompt": "7 + 5 = ?", "completion": "12", ...}]``
    """
    if not config.rollouts_every or step % config.rollouts_every:
        return []
    rounds = zip_longest(*(enumerate(group.trajectories) for group in groups))
    attempts = (pair for one_round in rounds for pair in one_round if pair is not None)
    return [_row(step, attempt, t) for attempt, t in islice(attempts, config.rollouts_per_table)]


def _row(step: int, attempt: int, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_number": trajectory.prompt.number,
        "attempt": attempt,
        "prompt": "\n".join(f"{m['role']}: {m['content']}" for m in trajectory.prompt.messages),
        "completion": trajectory.text,
        "target": trajectory.prompt.target,
        "reward": trajectory.reward,
        "status": trajectory.status,
        "version": min((turn.version for turn in trajectory.turns), default=None),
        "completion_tokens": sum(len(turn.completion_ids) for turn in trajectory.turns),
    }
