"""What every ``Tracker`` has to do."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from megarl.config import TrackingConfig
from megarl.interfaces import Tracker
from megarl.tracking.boundary import Trackers
from megarl.tracking.console import ConsoleTracker
from megarl.tracking.local import LocalTracker
from megarl.tracking.mlflow import MlflowTracker
from tests.tracking.records import RECORD, TIMES, group

CONFIG = TrackingConfig(rollouts_every=1)
MAKERS: dict[str, Callable[[Path, str], Tracker]] = {
    "console": lambda folder, store: ConsoleTracker(3, console=Console(file=io.StringIO())),
    "terminal": lambda folder, store: ConsoleTracker(3, console=Console(file=io.StringIO(), force_terminal=True)),
    "local": lambda folder, store: LocalTracker(folder, RECORD, CONFIG),
    "mlflow": lambda folder, store: MlflowTracker(RECORD, CONFIG, uri=store),
    "none": lambda folder, store: Trackers([]),
    "several": lambda folder, store: Trackers([LocalTracker(folder, RECORD, CONFIG), ConsoleTracker(3)]),
}


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_tracker_takes_whatever_a_run_gives_it(
    kind: str, status: str, tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MAKERS[kind](tmp_path, store)
    (tmp_path / "file").write_text("x")
    tracker.log({"eval/accuracy": 0.5}, step=0)
    tracker.log({**TIMES, "reward/mean": 0.5, "policy/grad_norm": math.inf, "odd % name [/]": math.nan}, step=1)
    tracker.log_rollouts([group(0, 1.0, None), group(1, 0.0)], step=1)
    tracker.log_rollouts([], step=2)
    tracker.log_file(tmp_path / "file")
    tracker.close(status)
    assert isinstance(tracker.run_id, str)
    assert not caplog.records, "a problem was told"
