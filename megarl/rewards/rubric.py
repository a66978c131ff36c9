"""The rubric: the weighted sum of reward functions over a trajectory."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from megarl.config import RewardConfig
from megarl.data.prompts import Task
from megarl.interfaces import RewardFn
from megarl.types import Trajectory

_log = logging.getLogger(__name__)


class Rubric:
    """Scores trajectories in place. Known parts are kept; the sum is None as soon as one part is."""

    def __init__(self, parts: Sequence[tuple[str, float, RewardFn]]) -> None:
        self._parts = tuple(parts)

    def score(self, trajectory: Trajectory) -> None:
        """Set ``reward`` and ``reward_parts``; an invalid trajectory has no reward."""
        if trajectory.status == "invalid":
            return
        for name, _, function in self._parts:
            trajectory.reward_parts[name] = _call(name, function, trajectory)
        known = [(weight, trajectory.reward_parts[name]) for name, weight, _ in self._parts]
        if all(value is not None for _, value in known):
            trajectory.reward = math.fsum(weight * value for weight, value in known if value is not None)


def _call(name: str, function: RewardFn, trajectory: Trajectory) -> float | None:
    """A verifier call is a boundary: whatever it raises on model output means "no reward", is logged and counted."""
    try:
        value = function(trajectory)
    except Exception:  # noqa: BLE001 - see above
        _log.exception("reward %s failed on prompt %d", name, trajectory.prompt.number)
        return None
    return value if value is not None and math.isfinite(value) else None


def make_rewards(configs: Sequence[RewardConfig], task: Task) -> Rubric:
    """The rubric that the config describes.

    Raises:
        ValueError: a reward that does not exist.
    """
    return Rubric([(config.name, config.weight, _function(config.name, task)) for config in configs])


def _function(name: str, task: Task) -> RewardFn:
    if name == "task":
        return lambda trajectory: task.verify(trajectory.prompt, trajectory.text)
    if name == "exact_match":
        return lambda trajectory: float(trajectory.text.strip() == task.answer_text(trajectory.prompt).strip())
    if ":" in name:
        return _from_file(name)
    raise ValueError(
        f"rewards.name ({name}) must be task, exact_match or path/to/file.py:function; use rewards=[{{name: task}}]"
    )


def _from_file(name: str) -> RewardFn:
    """A function of the user's: (trajectory) -> float or None."""
    path_text, _, function_name = name.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise ValueError(f"rewards.name ({name}) must name an existing file; there is no {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code: whatever it raises is a mistake of theirs
        raise ValueError(
            f"rewards.name ({name}) must name a file that can be imported: {type(error).__name__}: {error}; mend {path}"
        ) from error
    function: RewardFn | None = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"rewards.name ({name}) must name a function of {path}; it has no {function_name}")
    return function
