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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/moe_grpo_cpu.yaml"
TINY = ROOT / "examples/policies/tiny_moe"
NAME = "moe-grpo"
SHARED_MEMORY = "/dev/shm/"
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
    "tracking.rollouts_per_table=128",
)
"""The default run, cut to what a test can wait for; every rollout is recorded."""
SHORT = (*CUT, "max_steps=2", "tracking.mlflow.enabled=false", "data.eval.num_prompts=16")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    folder: Path
    text: str
    """What it printed."""


def command(verb: str, output: Path, *overrides: str, arguments: tuple[str, ...] = ()) -> list[str]:
    """``megarl verb`` on the default config, writing below ``output``."""
    return [sys.executable, "-m", "megarl.cli", verb, str(CONFIG), *arguments, f"output={output}", *overrides]


def printed(arguments: list[str], timeout_s: float = RUN_S) -> str:
    """What a command prints that has to go well."""
    with started(arguments) as process:
        out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err
    return out


def trained(output: Path, *overrides: str) -> Run:
    """A run of ``megarl train`` to its end."""
    text = printed(command("train", output, *overrides))
    return Run(output / NAME, text)


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
            process.communicate()


def wait_for(process: subprocess.Popen[str], condition: Callable[[], Any], what: str, timeout_s: float = RUN_S) -> Any:
    """The first true answer of ``condition`` while ``process`` runs."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        assert process.poll() is None, f"ended without {what}: {process.communicate()}"
        time.sleep(0.02)
    raise AssertionError(f"no {what} within {timeout_s:g} s")


# --- what a run records ----------------------------------------------------------------------------------------------


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


def newest_checkpoint(run: Path) -> int:
    """Its step; 0 when there is none."""
    return max((int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")), default=0)


def assert_proven(run: Path, steps: int) -> None:
    """Every sync was proven by log-probabilities, and engine and trainer agree on what was sampled."""
    rows = metrics(run)
    assert max(rows) == steps
    for step in range(1, steps + 1):
        assert rows[step]["sync/probe_max_diff"] < 1e-4
        assert rows[step]["policy/mismatch_kl"] < 1e-6


# --- what a run leaves behind ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traces:
    """What a command has started and mapped, to be looked for when it is over."""

    processes: list[psutil.Process]
    segments: set[Path]
    """Its files in /dev/shm."""


def traces(process: subprocess.Popen[str]) -> Traces:
    """Of a run, as soon as its ranks have mapped the weights' shared memory."""
    found: Traces = wait_for(process, lambda: _traces(process), "three ranks that share weights")
    return found


def _traces(process: subprocess.Popen[str]) -> Traces | None:
    processes = psutil.Process(process.pid).children(recursive=True)
    mapped = [_mapped(child.pid) for child in processes]
    weights = f"megarl-{NAME}-{process.pid}-"
    if sum(any(path.name.startswith(weights) for path in paths) for paths in mapped) < 3:
        return None
    return Traces(processes, set().union(*mapped))


def assert_no_process(left: Traces, timeout_s: float = 10) -> None:
    """All processes are gone soon."""
    _, alive = psutil.wait_procs(left.processes, timeout=timeout_s)
    assert not alive, alive


def assert_nothing(left: Traces, timeout_s: float = 10) -> None:
    """All processes are gone soon, and then all shared memory is."""
    assert_no_process(left, timeout_s)
    assert not [path for path in left.segments if path.exists()]


def worker(process: subprocess.Popen[str], run: Path, name: str) -> psutil.Process:
    """The process whose output goes to ``<run>/logs/<name>.log``."""
    log = str(run / "logs" / f"{name}.log")
    for child in psutil.Process(process.pid).children(recursive=True):
        if _name(child).startswith("ray::Shell") and os.path.realpath(f"/proc/{child.pid}/fd/1") == log:
            return child
    raise AssertionError(f"no process writes to {log}")


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _mapped(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = {line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line}
    return {Path(path) for path in paths if not path.endswith(" (deleted)")}
