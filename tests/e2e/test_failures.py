"""What breaks ends the run soon, with a name and a way on, and leaves nothing behind.

Most tests work on one run: each continues what the one before it broke, so what that left behind was usable.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import (
    CUT,
    NAME,
    RUN_S,
    SHARED_MEMORY,
    assert_nothing,
    command,
    metrics,
    newest_checkpoint,
    started,
    traces,
    wait_for,
    worker,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(RUN_S + 90)]

ENDLESS = (*CUT, "max_steps=1000", "recovery.every=1", "tracking.mlflow.enabled=false")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failures")


@contextmanager
def _training(output: Path) -> Iterator[subprocess.Popen[str]]:
    """The run, after the second step that follows its newest checkpoint."""
    folder = output / NAME
    newest = newest_checkpoint(folder)
    with started(command("train", output, *ENDLESS)) as process:
        wait_for(process, lambda: newest + 2 in metrics(folder), f"second step after step {newest}")
        assert newest_checkpoint(folder) > newest
        yield process


@pytest.mark.parametrize("name", ["trainer-1", "engine-0"])
def test_a_worker_that_dies_ends_the_run_with_its_name_and_its_last_words(name: str, output: Path) -> None:
    group, _, rank = name.partition("-")
    log = output / NAME / "logs" / f"{name}.log"
    with _training(output) as process:
        left = traces(process)
        with log.open("a") as file:
            file.write("these were its last words\n")
        killed = time.monotonic()
        worker(process, output / NAME, name).kill()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - killed < 60
        assert process.returncode == 1
        assert f"megarl: {group} rank {rank} died in " in err
        assert f"Last lines of {log}:" in err
        assert "  | these were its last words" in err
        assert "The last checkpoint stays usable" in err
        assert "Traceback" not in err.split("Last lines of")[0]
        assert_nothing(left)


def test_ctrl_c_stops_everything_within_ten_seconds(output: Path) -> None:
    with _training(output) as process:
        left = traces(process)
        interrupted = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=15)
        assert_nothing(left)
        assert time.monotonic() - interrupted < 10
        assert process.returncode == 130
        assert "interrupted; the last checkpoint stays usable" in err


def test_leaving_at_once_while_ray_starts_leaves_no_shared_memory(tmp_path: Path) -> None:
    with started(command("train", tmp_path, *ENDLESS)) as process:
        wait_for(process, lambda: psutil.Process(process.pid).children(), "first process of Ray")
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert "leaving without clean-up" in err
        assert not list(Path(SHARED_MEMORY).glob(f"megarl-{NAME}-{process.pid}-*"))
