"""The trackers of one run: the terminal, the run folder and MLflow."""

from __future__ import annotations

from pathlib import Path

from megarl.config import RunConfig
from megarl.environment import report, source_commit
from megarl.interfaces import Tracker
from megarl.tracking.boundary import Boundary, Trackers
from megarl.tracking.console import ConsoleTracker
from megarl.tracking.local import METRICS_FILE, LocalTracker
from megarl.tracking.mlflow import MlflowTracker
from megarl.tracking.mlflow_store import store_uri
from megarl.tracking.record import describe_run
from megarl.types import LoopState

CURVES_FILE = "curves.png"


def open_tracker(config: RunConfig, resumed: LoopState | None) -> Trackers:
    """The tracker of a run.

    Args:
        config: recorded whole.
        resumed: the checkpoint that the run goes on from: what was recorded of later steps is dropped, since they are
            made again, and in MLflow it stays one run. None starts afresh.
    """
    record = describe_run(config, report(), source_commit())
    step = resumed.step if resumed else None
    parts: list[Tracker] = [
        ConsoleTracker(config.max_steps, start_step=step or 0),
        LocalTracker(config.run_folder, record, config.tracking, resumed_step=step),
    ]
    if config.tracking.mlflow.enabled:
        run_id = resumed.tracker_run if resumed else ""
        parts.append(MlflowTracker(record, config.tracking, uri=mlflow_uri(config), run_id=run_id))
    return Trackers(parts)


def mlflow_uri(config: RunConfig) -> str:
    """Where MLflow keeps this run; empty when it does not."""
    mlflow = config.tracking.mlflow
    return store_uri(mlflow, config.output) if mlflow.enabled else ""


def add_curves(config: RunConfig, tracker: Tracker) -> None:
    """Draw the curves of what was recorded so far into the run folder, and give them to the tracker."""
    Boundary("curves").attempt(lambda: _draw(config.run_folder, tracker))


def _draw(folder: Path, tracker: Tracker) -> None:
    from megarl.tracking.curves import plot_run  # matplotlib: not while a run starts

    plot_run(folder / METRICS_FILE, folder / CURVES_FILE)
    tracker.log_file(folder / CURVES_FILE)
