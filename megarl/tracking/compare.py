"""``megarl compare``: reads runs, prints how they differ, and draws their curves over each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.tracking.compare_page import page
from megarl.tracking.compare_text import print_comparison
from megarl.tracking.comparison import Comparison, compare
from megarl.tracking.curves import plot_overlays
from megarl.tracking.runs import read_runs

PNG_FILE, PAGE_FILE = "curves.png", "comparison.html"


def compare_runs(runs: Sequence[str], *, uri: str = "", output: Path) -> Comparison:
    """Print and draw a comparison; writes curves.png and comparison.html into ``output``, and returns what they show.

    Args:
        runs: run folders, or ids or names of runs in MLflow.
        uri: MLflow tracking URI; empty is the store below runs/.
        output: a folder, made when missing.

    Raises:
        ValueError: a run that does not exist, or a name that several runs have.
    """
    comparison = compare(read_runs(runs, uri=uri))
    output.mkdir(parents=True, exist_ok=True)
    plot_overlays(comparison.curves(), comparison.labels, output / PNG_FILE)
    (output / PAGE_FILE).write_text(page(comparison), encoding="utf-8")
    print_comparison(comparison)
    print(f"\ncurves  {output / PNG_FILE}\npage    {output / PAGE_FILE}")
    return comparison
