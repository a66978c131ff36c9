"""The comparison of runs as data: what differs in their configs, and how each metric went."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megarl.tracking.runs import RecordedRun
from megarl.tracking.tracker import METRICS, Better, better

MISSING = "-"


@dataclass(frozen=True, slots=True)
class Course:
    """How one metric of one run went. ``best`` is None for a metric that has no better or worse."""

    start: float
    best: float | None
    last: float
    area: float | None
    """Under the curve over steps, by trapezoids; None for a single point."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that is shown, as data. Every tuple of values is in the order of ``runs``."""

    runs: tuple[RecordedRun, ...]
    differences: dict[str, tuple[str | None, ...]]
    """Config keys whose values are not all the same; None where a run has no such key."""
    courses: dict[str, tuple[Course | None, ...]]

    @property
    def labels(self) -> list[str]:
        """Names of the runs."""
        return [run.label for run in self.runs]

    def curves(self) -> dict[str, dict[str, tuple[tuple[int, float], ...]]]:
        """{metric: {label: (step, value) points}}, every run with every metric."""
        return {name: {run.label: run.metrics.get(name, ()) for run in self.runs} for name in self.courses}

    def best_last(self, name: str) -> set[int]:
        """Numbers of the runs whose last value of metric ``name`` is the best, when there is anything to choose."""
        lasts = {number: course.last for number, course in enumerate(self.courses[name]) if course is not None}
        direction = better(name)
        if direction == "neither" or len(set(lasts.values())) < 2:
            return set()
        top = max(lasts.values()) if direction == "higher" else min(lasts.values())
        return {number for number, last in lasts.items() if last == top}


def compare(runs: Sequence[RecordedRun]) -> Comparison:
    """What differs, and how each metric went in each run."""
    return Comparison(tuple(runs), differences([run.config for run in runs]), _courses(runs))


def differences(configs: Sequence[Mapping[str, str]]) -> dict[str, tuple[str | None, ...]]:
    """Keys, in the order of the configs, whose values are not the same everywhere."""
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: tuple(config.get(key) for config in configs) for key in keys}
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def course(points: Sequence[tuple[int, float]], direction: Better) -> Course | None:
    """Start, best, last and area of (step, value) points in order of step; None when there are none."""
    if not points:
        return None
    values = [value for _, value in points]
    best = {"higher": max(values), "lower": min(values), "neither": None}[direction]
    pairs = pairwise(points)
    area = sum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairs)
    return Course(values[0], best, values[-1], area if len(points) > 1 else None)


def number(value: float | None) -> str:
    """A value of a table."""
    return MISSING if value is None else f"{value:.4g}"


def excerpts(values: Sequence[str | None], width: int) -> list[str]:
    """Values in at most ``width`` characters each, from a little before the place where they begin to differ."""
    present = [value for value in values if value is not None]
    common = len(os.path.commonprefix(present))  # noqa: RUF071 - of characters, not of paths
    start = max(0, common - width // 4) if any(len(value or "") > width for value in values) else 0
    return [MISSING if value is None else clipped(value, width, start) for value in values]


def clipped(value: str, width: int, start: int = 0) -> str:
    """``value`` from ``start`` in at most ``width`` printable characters."""
    shown = f"…{value[start:]}" if start else value
    shown = shown if len(shown) <= width else f"{shown[: width - 1]}…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


def _courses(runs: Sequence[RecordedRun]) -> dict[str, tuple[Course | None, ...]]:
    """Held-out accuracy first, then in the order of ``METRICS``, then what is not known there."""
    found = {name for run in runs for name, points in run.metrics.items() if points}
    known = ["eval/accuracy", *METRICS]
    order = [name for name in dict.fromkeys(known) if name in found]
    order += sorted(found.difference(order))
    return {name: tuple(course(run.metrics.get(name, ()), better(name)) for run in runs) for name in order}
