"""Whole runs of the real command line, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/moe_grpo_cpu.yaml"
SHARED_MEMORY = Path("/dev/shm")
RUN_S = 150
"""Deadline of a short run; it takes some 30 s on two idle cores."""

CUT = (
    "max_steps=4",
    "prompts_per_step=16",
    "group_size=8",
    "data.eval.num_prompts=32",
    "data.eval.every=2",
    "recovery.every=2",
    "tracking.rollouts_every=1",
    "tracking.rollouts_per_table=4",
)
"""The default run, cut to what a test can wait for."""


def command(verb: str, output: Path, *overrides: str, config: Path = CONFIG) -> list[str]:
    """``megarl verb`` on the default config, writing below ``output``."""
    return [sys.executable, "-m", "megarl.cli", verb, str(config), f"output={output}", *overrides]


def megarl(*arguments: str, timeout_s: float = RUN_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    with started(list(arguments)) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A running command in a process group of its own; whatever happens, it is gone afterwards."""
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = RUN_S) -> Any:
    """The first true answer of ``condition``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {what} within {timeout_s:g} s")


def metrics(run: Path) -> dict[int, dict[str, float]]:
    """Everything recorded of each step."""
    rows: dict[int, dict[str, float]] = {}
    path = run / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.endswith("}"):
            row = json.loads(line)
            rows.setdefault(row["step"], {}).update(row)
    return rows


def numbers(run: Path) -> dict[int, dict[str, float]]:
    """The metrics that do not depend on the clock."""
    return {
        step: {name: value for name, value in row.items() if not name.endswith("_s")}
        for step, row in metrics(run).items()
    }


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes below a command."""
    return psutil.Process(process.pid).children(recursive=True)


def workers(process: subprocess.Popen[str], run: Path, name: str) -> list[psutil.Process]:
    """The worker processes whose output goes to ``<run>/logs/<name>-*.log``."""
    found = []
    for child in family(process):
        try:
            if any(f"{run}/logs/{name}-" in file.path for file in child.open_files()) and "ray::" in child.cmdline()[0]:
                found.append(child)
        except (psutil.Error, IndexError):
            continue
    return found


def segments() -> set[Path]:
    """Shared memory that a run of megarl makes."""
    return {path for path in SHARED_MEMORY.iterdir() if path.name.startswith("megarl-") or "cpushm" in path.name}


def assert_gone(processes: list[psutil.Process], before: set[Path], timeout_s: float = 10) -> None:
    """No process and no segment of a run is left."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not alive, alive
    wait_until(lambda: segments() <= before, "end of the run's shared memory", timeout_s)
