"""The end of a run in a few lines: what it reached, where the time went, where everything lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.tracking.local import METRICS_FILE, read_metrics, series
from megarl.tracking.mlflow_store import open_command
from megarl.tracking.record import without_password

_PHASES = ("generate", "score", "train", "sync", "evaluate", "save", "overhead")
_NOT_RECORDED = "not recorded"
Rows = Sequence[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Places:
    """Where a run left things; None or empty for what there is not."""

    checkpoint: Path | None = None
    curves: Path | None = None
    mlflow_run: str = ""
    mlflow_uri: str = ""


def run_summary(folder: Path, places: Places) -> str:
    """The summary of the run whose metrics.jsonl is in ``folder``."""
    rows = read_metrics(folder / METRICS_FILE)
    facts = {
        "held-out accuracy": _accuracy(series(rows, "eval/accuracy")),
        "reward": _first_last(series(rows, "reward/mean")),
        "mismatch_kl": _mismatch(series(rows, "policy/mismatch_kl")),
        "time": _time(rows),
        "checkpoint": str(places.checkpoint or "none"),
        "curves": str(places.curves) if places.curves and places.curves.is_file() else "none",
        "metrics": str(folder / METRICS_FILE),
        **_mlflow(places),
    }
    width = max(map(len, facts))
    steps = int(rows[-1]["step"]) if rows else 0
    return "\n".join([f"{folder.name}: {steps} steps", *(f"  {name:<{width}}  {fact}" for name, fact in facts.items())])


def _accuracy(points: Sequence[tuple[int, float]]) -> str:
    if not points:
        return _NOT_RECORDED
    (first_step, first), (last_step, last) = points[0], points[-1]
    gain = 100 * (last - first)
    return f"{first:.1%} -> {last:.1%} ({gain:+.1f} points, step {first_step} to {last_step})"


def _first_last(points: Sequence[tuple[int, float]]) -> str:
    return f"{points[0][1]:.3f} -> {points[-1][1]:.3f}" if points else _NOT_RECORDED


def _mismatch(points: Sequence[tuple[int, float]]) -> str:
    if not points:
        return _NOT_RECORDED
    step, largest = max(points, key=lambda point: point[1])
    return f"{points[-1][1]:.1e} at the end, at most {largest:.1e} (step {step})"


def _time(rows: Rows) -> str:
    """Share of each phase in the time of all steps."""
    total = _sum(rows, "time/step_s")
    if not total:
        return _NOT_RECORDED
    shares = {phase: _sum(rows, f"time/{phase}_s") / total for phase in _PHASES}
    where = ", ".join(f"{phase} {share:.1%}" for phase, share in sorted(shares.items(), key=lambda s: -s[1]) if share)
    return f"{_duration(total)} in steps: {where}"


def _sum(rows: Rows, name: str) -> float:
    return sum(value for _, value in series(rows, name))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _mlflow(places: Places) -> dict[str, str]:
    if not places.mlflow_uri:
        return {}
    if not places.mlflow_run:
        return {"MLflow run": f"none: {without_password(places.mlflow_uri)} was not reached"}
    return {"MLflow run": places.mlflow_run, "see it with": open_command(places.mlflow_uri)}
