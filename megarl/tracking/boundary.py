"""The border at which a tracking problem becomes a warning: nothing raised here reaches the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megarl.interfaces import Tracker
from megarl.types import TrajectoryGroup

_LOG = logging.getLogger(__name__)


class Boundary:
    """Carries out actions of one tracker; warns of the first that fails, and counts them all."""

    def __init__(self, name: str) -> None:
        self.problems = 0
        self._name = name

    def attempt(self, action: Callable[[], None]) -> bool:
        """Whether ``action`` went through."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the boundary: a tracking problem never ends a run
            self.problem(f"{type(error).__name__}: {error}")
            return False
        return True

    def problem(self, what: str) -> None:
        """Count a record that did not get through; the first is told, the others are for ``summarise``."""
        self.problems += 1
        if self.problems == 1:
            text = " ".join(what.split())
            _LOG.warning("%s: %s; the run goes on, further problems are only counted", self._name, text[:500])

    def summarise(self) -> None:
        """Tell at the end how much was lost, if anything was."""
        if self.problems:
            _LOG.warning("%s: %d records did not get through", self._name, self.problems)


class Trackers:
    """Several trackers as one ``Tracker``; what one of them raises is warned of once, counted, and stays in here.

    Args:
        parts: the trackers, in the order in which they are told; none records nothing.
    """

    def __init__(self, parts: Sequence[Tracker]) -> None:
        self._parts = [(part, Boundary(type(part).__name__)) for part in parts]

    @property
    def run_id(self) -> str:
        """Of the first part that has one."""
        return next((part.run_id for part, _ in self._parts if part.run_id), "")

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Record metrics of one step everywhere."""
        self._each(lambda part: part.log(metrics, step=step))

    def log_rollouts(self, groups: Sequence[TrajectoryGroup], *, step: int) -> None:
        """Record sampled rollouts everywhere."""
        self._each(lambda part: part.log_rollouts(groups, step=step))

    def log_file(self, path: Path) -> None:
        """Attach a file everywhere."""
        self._each(lambda part: part.log_file(path))

    def close(self, status: str) -> None:
        """End the run everywhere, and tell what was lost."""
        self._each(lambda part: part.close(status))
        for _, boundary in self._parts:
            boundary.summarise()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for part, boundary in self._parts:
            boundary.attempt(partial(action, part))
