"""Small runs, groups and records for the tests of tracking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.tracking.record import RunRecord
from megarl.types import Prompt, SyncReport, Trajectory, TrajectoryGroup, Turn

RECORD = RunRecord(
    name="tiny",
    config={"seed": 0, "trainer": {"optimizer": {"lr": 0.001}}},
    environment=("Python  3.11",),
    versions={"torch": "2.13.0"},
    commit="0123abc",
)
REPORT = SyncReport(
    version=5, bytes_moved=100, lower_bound_bytes=80, stage_s=0.1, install_s=0.2, pause_s=0.3, probe_max_diff=1e-6
)
TIMES = {"time/step_s": 2.0, "time/generate_s": 1.0, "time/train_s": 0.5, "time/overhead_s": 0.5}


def attempt(number: int, reward: float | None, tokens: int = 2, *, status: Any = "finished") -> Trajectory:
    prompt = Prompt(number, ({"role": "user", "content": f"{number} + 1 = ?"},), str(number + 1))
    turn = Turn((1, 2, 3), tuple(range(tokens)), (-0.1,) * tokens, version=4, finish_reason="stop")
    return Trajectory(prompt, [turn], f"answer {reward}", status, reward, {"task": reward})


def group(number: int, *rewards: float | None) -> TrajectoryGroup:
    attempts = tuple(attempt(number, reward) for reward in rewards)
    return TrajectoryGroup(attempts[0].prompt, attempts)


def write_run(folder: Path, lines: list[str], config: str = "seed: 0\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "config.yaml").write_text(config)
    return folder
