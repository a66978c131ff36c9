"""``megarl compare``: what differs between the configs of runs, and how their metrics went."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.tracking.compare_page import write_page
from megarl.tracking.curves import plot_overlays
from megarl.tracking.runs import RecordedRun, read_runs
from megarl.tracking.tracker import METRICS, Better, better

PNG_FILE, PAGE_FILE = "curves.png", "comparison.html"
_MISSING = "–"
_CELL = 44
"""Characters of a config value in the terminal; the page shows all of it."""


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


def compare_runs(runs: Sequence[str], *, uri: str = "", output: Path) -> Comparison:
    """Print and draw a comparison; writes curves.png and comparison.html into ``output``.

    Args:
        runs: run folders, or ids or names of runs in MLflow.
        uri: MLflow tracking URI; empty is the store below runs/.
        output: a folder, made when missing.

    Raises:
        ValueError: a run that does not exist, or a name that several runs have.
    """
    comparison = compare(read_runs(runs, uri=uri))
    _print(comparison)
    output.mkdir(parents=True, exist_ok=True)
    curves = {name: {run.label: run.metrics.get(name, ()) for run in comparison.runs} for name in comparison.courses}
    plot_overlays(curves, comparison.labels, output / PNG_FILE)
    write_page(output / PAGE_FILE, comparison, curves)
    print(f"\ncurves: {output / PNG_FILE}\npage:   {output / PAGE_FILE}")
    return comparison


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
    pairs = zip(points, points[1:], strict=False)
    area = sum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairs)
    return Course(values[0], best, values[-1], area if len(points) > 1 else None)


def number(value: float | None) -> str:
    """A value of a table."""
    return _MISSING if value is None else f"{value:.4g}"


def excerpts(values: Sequence[str | None], width: int = _CELL) -> list[str]:
    """Values in at most ``width`` characters each, from a little before the place where they begin to differ."""
    common = len(os.path.commonprefix([value for value in values if value is not None]))
    start = max(0, common - width // 4) if any(len(value or "") > width for value in values) else 0
    return [_MISSING if value is None else _cut(value, start, width) for value in values]


def _cut(value: str, start: int, width: int) -> str:
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


def _print(comparison: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        made = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False)
        for position, column in enumerate(columns):
            made.add_column(Text(column), overflow="fold", justify="left" if position < len(columns) - 4 else "right")
        for row in rows:
            made.add_row(*map(Text, row))
        return made

    console = Console(soft_wrap=not Console().is_terminal)
    labels = [_cut(label, 0, _CELL) for label in comparison.labels]
    rows = [[_cut(key, 0, _CELL), *excerpts(values)] for key, values in comparison.differences.items()]
    console.print(table("What differs in the configs", ["key", *labels], rows) if rows else "The configs are the same.")
