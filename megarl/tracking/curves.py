"""Pictures of metrics over steps: one run with what matters most, or several runs over each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from megarl.tracking.local import read_metrics, series

Points = Sequence[tuple[int, float]]

PALETTE = ("#2f6fb5", "#d9722b", "#3a9d6e", "#a552a8", "#c9423f", "#7d8b2a", "#3aa6b9", "#6b6b76")
"""Told apart in print and by most eyes; runs beyond the eighth repeat it with other dashes."""
_DASHES = ("-", "--", ":", "-.")
_INK, _FAINT = "#2b2f36", "#e4e6ea"
_PHASES = {
    "generate": PALETTE[0],
    "score": PALETTE[6],
    "train": PALETTE[1],
    "sync": PALETTE[2],
    "evaluate": PALETTE[3],
    "save": PALETTE[4],
    "overhead": PALETTE[7],
}
"""Of a step, in order, each with its colour."""
_SMOOTHED_FROM = 30
"""Points from which a running mean is drawn over the raw values."""
_LOG_SPAN = 50.0
"""Ratio of largest to smallest value from which a positive metric gets a logarithmic axis."""


def plot_run(metrics: Path, png: Path) -> None:
    """Draw a metrics.jsonl: reward, held-out accuracy, mismatch_kl, entropy, gradient norm and where the time went."""
    rows = read_metrics(metrics)
    figure = Figure(figsize=(13.5, 7.2), layout="constrained")
    axes = list(figure.subplots(2, 3).flat)
    _draw_single(axes[0], "reward (mean)", series(rows, "reward/mean"), PALETTE[0])
    _draw_accuracy(axes[1], series(rows, "eval/accuracy"))
    _draw_single(axes[2], "mismatch_kl (nats)", series(rows, "policy/mismatch_kl"), PALETTE[4])
    _draw_single(axes[3], "entropy (nats)", series(rows, "policy/entropy"), PALETTE[3])
    _draw_single(axes[4], "gradient norm", series(rows, "policy/grad_norm"), PALETTE[5])
    _draw_time(axes[5], rows)
    last_step = int(rows[-1]["step"]) if rows else 0
    for axis in axes:
        axis.set_xlim(-0.02 * max(last_step, 1), 1.02 * max(last_step, 1) + 0.5)
    _title(figure, f"{metrics.resolve().parent.name}: {last_step} steps")
    figure.savefig(png, dpi=110)


def overlay(name: str, runs: Mapping[str, Points]) -> Figure:
    """One metric of several runs, by label, over each other. Empty runs keep their colour for the others' sake."""
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    _draw_runs(axes, name, runs)
    return figure


def plot_overlays(metrics: Mapping[str, Mapping[str, Points]], labels: Sequence[str], png: Path) -> None:
    """All of ``metrics`` ({name: {label: points}}) in one picture, three to a row, with one legend."""
    columns = min(3, max(1, len(metrics)))
    lines = max(1, math.ceil(len(metrics) / columns))
    figure = Figure(figsize=(4.6 * columns, 2.9 * lines + 0.5), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (name, runs) in zip(axes, metrics.items(), strict=False):
        _draw_runs(axis, name, runs)
    for axis in axes[len(metrics) :]:
        axis.set_axis_off()
    legend = figure.legend(
        handles=[_handle(axes[0], number) for number in range(len(labels))],
        labels=[_text(label) for label in labels],
        loc="outside upper center",
        ncols=min(4, max(1, len(labels))),
        frameon=False,
    )
    _literally(legend.get_texts())
    figure.savefig(png, dpi=110)


def colour(number: int) -> str:
    """Of the run with this number, wherever it is drawn."""
    return PALETTE[number % len(PALETTE)]


def _dash(number: int) -> str:
    return _DASHES[number // len(PALETTE) % len(_DASHES)]


def _draw_runs(axes: Any, name: str, runs: Mapping[str, Points]) -> None:
    _dress(axes, name)
    for number, points in enumerate(runs.values()):
        _line(axes, points, colour(number), _dash(number))
    _scale(axes, [value for points in runs.values() for _, value in points])
    tops = [_steady_top([value for _, value in points]) for points in runs.values() if points]
    if name.startswith("time/") and tops:
        axes.set_ylim(0, max(tops))


def _draw_accuracy(axes: Any, points: Points) -> None:
    _dress(axes, "held-out accuracy")
    if not points:
        _say_empty(axes)
        return
    axes.plot(*zip(*points, strict=True), color=PALETTE[2], lw=2, marker="o", ms=5, mec="white", mew=1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    low, high = min(v for _, v in points), max(v for _, v in points)
    room = max(0.25 * (high - low), 0.05)
    axes.set_ylim(max(0.0, low - room), min(1.0 + room / 4, high + room))
    ends = [(points[0], "left", -14)] + ([(points[-1], "right", 8)] if len(points) > 1 else [])
    for (step, value), side, above in ends:
        note = {"xytext": (0, above), "textcoords": "offset points", "ha": side, "color": _INK, "fontsize": 9}
        axes.annotate(f"{value:.1%}", (step, value), **note)


def _draw_single(axes: Any, title: str, points: Points, line_colour: str) -> None:
    _dress(axes, title)
    if not points:
        _say_empty(axes)
        return
    _line(axes, points, line_colour, "-")
    _scale(axes, [value for _, value in points])


def _draw_time(axes: Any, rows: Sequence[dict[str, float]]) -> None:
    """Seconds of each step, stacked by phase."""
    _dress(axes, "seconds per step")
    timed = [row for row in rows if "time/step_s" in row]
    if not timed:
        _say_empty(axes)
        return
    phases = [(name, c) for name, c in _PHASES.items() if any(f"time/{name}_s" in row for row in timed)]
    heights = [[row.get(f"time/{name}_s", 0.0) for row in timed] for name, _ in phases]
    edges = [row["step"] - 0.5 for row in timed] + [timed[-1]["step"] + 0.5]
    closed = [[*layer, layer[-1]] for layer in heights]  # the last step is as wide as the others
    names, colours = zip(*phases, strict=True)
    axes.stackplot(edges, closed, colors=colours, labels=names, lw=0, step="post")
    totals = [sum(column) for column in zip(*heights, strict=True)]
    top = _steady_top(totals)
    axes.set_ylim(0, top)
    axes.legend(ncols=len(names), fontsize=8, frameon=False, loc="upper right", handlelength=1, columnspacing=1)
    _name_slowest(axes, timed, totals, top)


def _name_slowest(axes: Any, timed: Sequence[dict[str, float]], totals: Sequence[float], top: float) -> None:
    """Say how long the slowest step took when it does not fit."""
    slowest = max(totals)
    if slowest > top:
        text = f"step {int(timed[totals.index(slowest)]['step'])}: {slowest:.1f} s"
        beside = {"xytext": (6, 0), "textcoords": "offset points", "fontsize": 8, "color": "#5b616b", "va": "center"}
        axes.annotate(text, (timed[totals.index(slowest)]["step"] + 0.5, 0.86 * top), **beside)


def _steady_top(totals: Sequence[float]) -> float:
    """Upper end of the axis, from all steps but the first, which warms up, and a few stragglers."""
    steady = sorted(totals[1:] or totals)
    usual = steady[math.ceil(0.95 * len(steady)) - 1]
    return max(1.3 * usual, 1e-9)


def _line(axes: Any, points: Points, line_colour: str, dash: str) -> None:
    if not points:
        return
    steps, values = zip(*points, strict=True)
    marker = "o" if len(points) == 1 else None
    if len(points) < _SMOOTHED_FROM:
        axes.plot(steps, values, color=line_colour, ls=dash, lw=1.8, marker=marker)
        return
    axes.plot(steps, values, color=line_colour, ls=dash, lw=0.9, alpha=0.35)
    axes.plot(steps, _running_mean(values), color=line_colour, ls=dash, lw=2)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Over the last twentieth of the run's length, at least five points."""
    width = max(5, len(values) // 20)
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [math.fsum(window) / len(window) for window in windows]


def _scale(axes: Any, values: Sequence[float]) -> None:
    if values and min(values) > 0 and max(values) / min(values) > _LOG_SPAN:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _dress(axes: Any, title: str) -> None:
    heading = axes.set_title(_text(title), loc="left", fontsize=10.5, color=_INK, fontweight="bold")
    _literally([heading])
    axes.tick_params(which="both", colors="#5b616b", labelsize=9, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b7bcc4")
    axes.grid(True, color=_FAINT, lw=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step", fontsize=9, color="#5b616b")


def _title(figure: Figure, text: str) -> None:
    _literally([figure.suptitle(_text(text), x=0.008, ha="left", fontsize=13, color=_INK)])


def _say_empty(axes: Any) -> None:
    axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="#9aa0a8")
    axes.set(xticks=[], yticks=[])


def _handle(axes: Any, number: int) -> Any:
    (handle,) = axes.plot([], [], color=colour(number), ls=_dash(number), lw=2)
    return handle


def _text(text: str) -> str:
    """Names come from people: at most one short line, and no leading underscore, which would hide a legend entry."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f" {shown}" if shown.startswith("_") else shown


def _literally(texts: Sequence[Any]) -> None:
    """No mathematical typesetting: a $ in a name is a $."""
    for text in texts:
        text.set_parse_math(False)
