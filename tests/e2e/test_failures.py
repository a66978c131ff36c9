"""What breaks ends the run soon, with a name and a way on, and leaves nothing behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import (
    CUT,
    RUN_S,
    assert_gone,
    command,
    family,
    metrics,
    segments,
    started,
    wait_until,
    workers,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(RUN_S + 60)]

ENDLESS = (*CUT, "max_steps=1000", "recovery.every=1", "tracking.mlflow.enabled=false")


@pytest.mark.parametrize("name", ["trainer", "engine"])
def test_a_worker_that_dies_ends_the_run_with_its_name_and_its_last_words(name: str, tmp_path: Path) -> None:
    before, folder = segments(), tmp_path / "moe-grpo"
    with started(command("train", tmp_path, *ENDLESS)) as process:
        wait_until(lambda: 2 in metrics(folder), "second step")
        children = family(process)
        victim = workers(process, folder, name)[0]
        killed = time.monotonic()
        victim.kill()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - killed < 60
        assert process.returncode == 1
        assert f"{name} rank" in err
        assert f"{name}-" in err
        assert ".log" in err
        assert "Traceback" not in err.split("Last lines of")[0]
        assert list((folder / "checkpoints").glob("step-*"))
        assert_gone(children, before)


def test_ctrl_c_stops_everything_within_ten_seconds(tmp_path: Path) -> None:
    before, folder = segments(), tmp_path / "moe-grpo"
    with started(command("train", tmp_path, *ENDLESS)) as process:
        wait_until(lambda: 2 in metrics(folder), "second step")
        children = family(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert "interrupted" in err
        assert_gone(children, before)
