"""Stopping: Ctrl-C, SIGTERM, kill -9, and clean-up that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")


def run_python(*args: str) -> subprocess.Popen[str]:
    """A driver in a process group of its own, as a shell makes one for Ctrl-C."""
    return subprocess.Popen(
        [sys.executable, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def seconds_until(done: Callable[[], bool], limit_s: float) -> float:
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < limit_s, f"not within {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - start


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def busy(tmp_path):
    """A driver whose two workers spin, with the pids of everything it started, and a file they map."""
    segment = SHARED_MEMORY / f"test-signals-{os.getpid()}"
    segment.write_bytes(bytes(4096))
    driver = run_python("tests/orchestration/busy_driver.py", str(tmp_path), str(segment))
    line = driver.stdout.readline()
    if not line:
        pytest.fail(driver.stderr.read())
    time.sleep(0.5)
    started = json.loads(line)["started"]
    assert set(json.loads(line)["children"]) <= set(alive(started))
    yield driver, started, segment
    for pid in alive(started):
        os.kill(pid, signal.SIGKILL)
    driver.kill()
    driver.communicate()
    segment.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_and_no_shared_memory_within_ten_seconds(busy, number):
    driver, started, segment = busy
    os.killpg(driver.pid, number)
    seconds_until(lambda: driver.poll() is not None and not alive(started), limit_s=10)
    assert f"KeyboardInterrupt: {number.name}" in driver.stderr.read()
    assert not segment.exists()


@pytest.mark.slow
def test_a_killed_driver_takes_all_it_started_down(busy):
    driver, started, _ = busy
    driver.kill()
    seconds_until(lambda: not alive(started), limit_s=10)


STARTING = """
import sys
from megarl.orchestration.ray_workers import RayCluster
with RayCluster(object_store_bytes=100 * 2**20):
    sys.exit("it was to be killed while Ray starts")
"""


@pytest.mark.slow
def test_a_driver_killed_while_ray_starts_takes_all_it_started_down():
    driver = run_python("-c", STARTING)
    started: set[int] = set()

    def several() -> bool:
        started.update(process.pid for process in psutil.Process(driver.pid).children(recursive=True))
        return len(started) > 3

    seconds_until(several, limit_s=30)
    time.sleep(0.5)
    started.update(process.pid for process in psutil.Process(driver.pid).children(recursive=True))
    driver.kill()
    seconds_until(lambda: not alive(list(started)), limit_s=5)
    assert driver.communicate()[1] == ""


HANGING = """
import asyncio, sys, time
from megarl.orchestration.signals import run_until_signal
async def main():
    print("ready", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("cleaning", flush=True)
        time.sleep(60)
run_until_signal(main(), grace_s=float(sys.argv[1]))
"""


def test_cleaning_up_that_hangs_is_cut_off():
    driver = run_python("-c", HANGING, "0.5")
    assert driver.stdout.readline() == "ready\n"
    driver.send_signal(signal.SIGTERM)
    _, errors = driver.communicate(timeout=10)
    assert driver.returncode == 128 + signal.SIGTERM
    assert "stopping took longer than 0.5 s" in errors


def test_a_second_signal_ends_the_process_at_once():
    driver = run_python("-c", HANGING, "60")
    assert driver.stdout.readline() == "ready\n"
    driver.send_signal(signal.SIGINT)
    assert driver.stdout.readline() == "cleaning\n"
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=10)
    assert driver.returncode == 128 + signal.SIGINT


def test_results_and_errors_pass_through():
    from megarl.orchestration.signals import run_until_signal

    async def fine() -> int:
        return 3

    async def broken() -> int:
        raise ArithmeticError("broken")

    before = signal.getsignal(signal.SIGTERM)
    assert run_until_signal(fine()) == 3
    with pytest.raises(ArithmeticError):
        run_until_signal(broken())
    assert signal.getsignal(signal.SIGTERM) is before
