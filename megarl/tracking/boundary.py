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
    """Several trackers as one ``Tracker``; each behind its own boundary."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = [(tracker, Boundary(type(tracker).__name__)) for tracker in trackers]

    @property
    def run_id(self) -> str:
        """Of the first tracker that has one."""
        return next((tracker.run_id for tracker, _ in self._trackers if tracker.run_id), "")

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Record metrics of one step everywhere."""
        self._each(lambda tracker: tracker.log(metrics, step=step))

    def log_rollouts(self, groups: Sequence[TrajectoryGroup], *, step: int) -> None:
        """Record sampled rollouts everywhere."""
        self._each(lambda tracker: tracker.log_rollouts(groups, step=step))

    def log_file(self, path: Path) -> None:
        """Attach a file everywhere."""
        self._each(lambda tracker: tracker.log_file(path))

    def close(self, status: str) -> None:
        """End the run everywhere, and tell what was lost."""
        self._each(lambda tracker: tracker.close(status))
        for _, boundary in self._trackers:
            boundary.summarise()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for tracker, boundary in self._trackers:
            boundary.attempt(partial(action, tracker))
