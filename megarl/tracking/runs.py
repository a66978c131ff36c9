"""Recorded runs, read back from a run folder or from MLflow, in one form."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megarl.tracking.local import CONFIG_FILE, METRICS_FILE, read_metrics, series
from megarl.tracking.mlflow_names import accepted_name, accepted_value
from megarl.tracking.mlflow_store import connect, sqlite_file, store_uri_below
from megarl.tracking.record import flatten, without_password

RUNS = Path("runs")
"""Where runs lie when the config does not say otherwise."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Example: ``RecordedRun("moe-grpo", {"seed": "0"}, {"reward/mean": ((1, 0.5), (2, 0.6))})``."""

    label: str
    config: dict[str, str]
    """Flat, with keys and values as MLflow takes them, so that both sources compare."""
    metrics: dict[str, tuple[tuple[int, float], ...]]
    """(step, value) in order of step; only finite values."""


def read_runs(names: Sequence[str], *, uri: str) -> list[RecordedRun]:
    """Each of ``names`` is a run folder, or the id or name of a run in MLflow; labels of the result differ.

    Raises:
        ValueError: a run that does not exist, or a name that several runs have.
    """
    client: Any = None
    runs: list[RecordedRun] = []
    for name in names:
        folder = Path(name)
        if (folder / METRICS_FILE).is_file():
            runs.append(_from_folder(folder))
            continue
        client = client or _open_store(name, uri)
        runs.append(_from_mlflow(client, _find(client, name)))
    return _with_own_labels(runs, names)


def _from_folder(folder: Path) -> RecordedRun:
    rows = read_metrics(folder / METRICS_FILE)
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    config_file = folder / CONFIG_FILE
    config = yaml.safe_load(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    return RecordedRun(
        label=folder.resolve().name,
        config={accepted_name(key): accepted_value(value) for key, value in flatten(config).items()},
        metrics={accepted_name(name): tuple(series(rows, name)) for name in names},
    )


def _from_mlflow(client: Any, run: Any) -> RecordedRun:
    metrics = {}
    for name in run.data.metrics:
        history = sorted(client.get_metric_history(run.info.run_id, name), key=lambda m: m.timestamp)
        by_step = {m.step: m.value for m in history}  # a resumed run made some steps twice: the later one counts
        metrics[name] = tuple((step, by_step[step]) for step in sorted(by_step) if math.isfinite(by_step[step]))
    return RecordedRun(run.info.run_name, dict(run.data.params), metrics)


def _open_store(name: str, uri: str) -> Any:
    uri = uri or store_uri_below(RUNS)
    file = sqlite_file(uri)
    if file is not None and not file.is_file():
        raise ValueError(
            f"run {name!r} must be a folder with a {METRICS_FILE} or a run in MLflow, and it is no such folder, nor is "
            f"there an MLflow store at {file} (--uri names another); "
            f"{_closest(name, _folders_near(Path(name)), 'run folders')}"
        )
    return connect(uri)


def _find(client: Any, name: str) -> Any:
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = list(client.search_runs(experiments, max_results=1000))
    matches = [run for run in runs if name in (run.info.run_id, run.info.run_name)]
    if len(matches) == 1:
        return matches[0]
    where = without_password(str(client.tracking_uri))
    if matches:
        raise ValueError(
            f"run name {name!r} must name one run, and {len(matches)} runs in {where} have it; "
            f"use an id: {', '.join(run.info.run_id for run in matches)}"
        )
    known = [*(run.info.run_name for run in runs), *_folders_near(Path(name))]
    raise ValueError(
        f"run {name!r} must be a folder with a {METRICS_FILE} or a run in MLflow, and is neither that nor in "
        f"{where}; {_closest(name, known, 'runs')}"
    )


def _folders_near(path: Path) -> list[str]:
    """Run folders beside ``path``, and in the usual place."""
    parents = dict.fromkeys((path.parent, RUNS))
    return sorted(str(file.parent) for parent in parents for file in parent.glob(f"*/{METRICS_FILE}"))


def _closest(name: str, known: Sequence[str], what: str) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(dict.fromkeys(close))}?"
    listed = list(dict.fromkeys(known))[:10]
    return f"{what} there: {', '.join(listed)}" if listed else f"there are no {what}"


def _with_own_labels(runs: Sequence[RecordedRun], names: Sequence[str]) -> list[RecordedRun]:
    """Labels that several runs share are replaced by what was asked for, numbered where that is the same too."""
    shared = len({run.label for run in runs}) < len(runs)
    labels: list[str] = []
    for run, name in zip(runs, names, strict=True):
        label = wanted = name if shared else run.label
        number = 2
        while label in labels:
            label, number = f"{wanted} ({number})", number + 1
        labels.append(label)
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]
