"""The record of a run in its own folder: what every reader can rely on, with or without a tracking server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megarl.config import TrackingConfig
from megarl.tracking.record import RunRecord
from megarl.tracking.rollouts import rollout_rows
from megarl.types import TrajectoryGroup

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.txt"


class LocalTracker:
    """Writes metrics.jsonl, rollouts.jsonl, config.yaml and environment.txt.

    Every ``log`` adds one line, ``{"step": 12, "reward/mean": 0.5, ...}``, flushed at once; a value that is not finite
    is null. A resumed run keeps the lines up to ``resumed_step``; those of later steps are dropped, since those steps
    are made again. An evaluation that is made again adds a line that says the same. None starts afresh.
    """

    def __init__(
        self, folder: Path, record: RunRecord, config: TrackingConfig, *, resumed_step: int | None = None
    ) -> None:
        self.run_id = ""
        self._config = config
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / CONFIG_FILE, record.config_yaml())
        _replace(folder / ENVIRONMENT_FILE, record.environment_text())
        for name in (METRICS_FILE, ROLLOUTS_FILE):
            kept = [] if resumed_step is None else [r for r in read_lines(folder / name) if r["step"] <= resumed_step]
            _replace(folder / name, "".join(map(_line, kept)))
        self._metrics = (folder / METRICS_FILE).open("a")
        self._rollouts = (folder / ROLLOUTS_FILE).open("a")

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Add one line of metrics."""
        self._metrics.write(_line({"step": step, **{k: v if math.isfinite(v) else None for k, v in metrics.items()}}))
        self._metrics.flush()

    def log_rollouts(self, groups: Sequence[TrajectoryGroup], *, step: int) -> None:
        """Add one line per rollout, when rollouts are due."""
        self._rollouts.writelines(map(_line, rollout_rows(groups, step=step, config=self._config)))
        self._rollouts.flush()

    def log_file(self, path: Path) -> None:
        """Nothing to do: what a run makes lies in its folder."""

    def close(self, status: str) -> None:
        """Close the files."""
        self._metrics.close()
        self._rollouts.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """One row per step, in order. Lines of one step are merged, the later one wins; null is NaN."""
    rows: dict[int, dict[str, float]] = {}
    for line in read_lines(path):
        row = rows.setdefault(line["step"], {})
        row.update({name: math.nan if value is None else value for name, value in line.items()})
    return [rows[step] for step in sorted(rows)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a JSON-lines file; none when there is no file. A last line cut by a crash is left out."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def series(rows: Iterable[dict[str, float]], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric where it is finite."""
    return [(int(row["step"]), row[name]) for row in rows if name in row and math.isfinite(row[name])]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, default=_plain_number) + "\n"


def _plain_number(value: Any) -> float:
    """A numpy or torch scalar as a number."""
    return float(value)


def _replace(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all."""
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
