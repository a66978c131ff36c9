from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from megarl.tracking.background import Background
from megarl.tracking.boundary import Boundary, Trackers
from tests.tracking.records import group


class Broken:
    run_id = ""

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        raise OSError("disk full")

    def log_rollouts(self, groups: object, *, step: int) -> None:
        raise OSError("disk full")

    def log_file(self, path: Path) -> None:
        raise OSError("disk full")

    def close(self, status: str) -> None:
        raise OSError("disk full")


class Remembering:
    run_id = "run-7"

    def __init__(self) -> None:
        self.seen: list[object] = []

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.seen.append((metrics, step))

    def log_rollouts(self, groups: object, *, step: int) -> None:
        self.seen.append(step)

    def log_file(self, path: Path) -> None:
        self.seen.append(path)

    def close(self, status: str) -> None:
        self.seen.append(status)


def test_a_broken_tracker_is_warned_of_once_and_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    other = Remembering()
    trackers = Trackers([Broken(), other])
    for step in (1, 2, 3):
        trackers.log({"a": 1.0}, step=step)
    trackers.log_rollouts([group(0, 1.0)], step=3)
    trackers.log_file(Path("f"))
    assert len(caplog.records) == 1
    assert "Broken: OSError: disk full" in caplog.text
    trackers.close("FINISHED")
    assert "6 records did not get through" in caplog.records[-1].message
    assert other.seen == [({"a": 1.0}, 1), ({"a": 1.0}, 2), ({"a": 1.0}, 3), 3, Path("f"), "FINISHED"]
    assert trackers.run_id == "run-7"


def test_an_interrupt_passes_the_boundary() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Boundary("x").attempt(interrupted)


def test_background_work_is_done_in_order_and_before_close_returns() -> None:
    done: list[int] = []
    background = Background(Boundary("x"), capacity=100)
    for number in range(50):
        background.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    background.close(deadline_s=10)
    assert done == list(range(50))


def test_a_full_queue_drops_and_counts_instead_of_waiting() -> None:
    release, boundary = threading.Event(), Boundary("x")
    background = Background(boundary, capacity=2)
    background.submit(lambda: release.wait(10) and None)
    start = time.perf_counter()
    for _ in range(20):
        background.submit(lambda: None)
    assert time.perf_counter() - start < 1
    assert boundary.problems >= 17  # two wait, and the thread may have taken the first
    release.set()
    background.close(deadline_s=10)


def test_close_gives_up_at_its_deadline() -> None:
    release, boundary = threading.Event(), Boundary("x")
    background = Background(boundary, capacity=1)
    background.submit(lambda: release.wait(30) and None)
    start = time.perf_counter()
    background.close(deadline_s=0.5)
    assert time.perf_counter() - start < 2
    assert boundary.problems == 1
    release.set()
