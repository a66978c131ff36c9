"""A comparison in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.tracking.comparison import Comparison, clipped, excerpts, number
from megarl.tracking.tracker import better

_CELL = 40
"""Characters of a config value or a name; the page shows all of it."""
_PLAIN_WIDTH = 200
"""Columns in a file or pipe."""
ARROWS = {"higher": "↑", "lower": "↓", "neither": ""}


def print_comparison(comparison: Comparison) -> None:
    """Print what differs, then start, best, last and area of every metric."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    if comparison.differences:
        console.print("What differs in the configs", style="bold", highlight=False)
        console.print(_differences(comparison))
    else:
        console.print("The configs are the same.")
    console.print("\nMetrics (↑ higher is better, ↓ lower is better)", style="bold", highlight=False)
    console.print(_metrics(comparison))


def _differences(comparison: Comparison) -> Table:
    labels = [clipped(label, _CELL) for label in comparison.labels]
    table = _table(["key", *labels])
    for key, values in comparison.differences.items():
        table.add_row(*map(Text, (clipped(key, _CELL), *excerpts(values, _CELL))))
    return table


def _metrics(comparison: Comparison) -> Table:
    table = _table(["metric", "", "run"])
    for title in ("start", "best", "last", "area"):
        table.add_column(title, justify="right")
    for name, courses in comparison.courses.items():
        best = comparison.best_last(name)
        heads = (clipped(name, _CELL), ARROWS[better(name)])
        for run, (label, course) in enumerate(zip(comparison.labels, courses, strict=True)):
            if course is None:
                continue
            values = map(number, (course.start, course.best, course.last, course.area))
            style = "bold green" if run in best else ""
            table.add_row(*map(Text, heads), *(Text(t, style=style) for t in (clipped(label, _CELL), *values)))
            heads = ("", "")
        table.add_section()
    return table


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table
