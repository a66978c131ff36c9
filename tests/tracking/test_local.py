from __future__ import annotations

import json
import math
from pathlib import Path

import yaml

from megarl.config import TrackingConfig
from megarl.tracking.local import LocalTracker, read_lines, read_metrics, series
from tests.tracking.records import RECORD, group

CONFIG = TrackingConfig(rollouts_every=1, rollouts_per_table=1)


def record(folder: Path, steps: range, *, resumed_step: int | None = None, value: float = 0.0) -> None:
    tracker = LocalTracker(folder, RECORD, CONFIG, resumed_step=resumed_step)
    for step in steps:
        tracker.log({"reward/mean": step + value}, step=step)
        tracker.log_rollouts([group(step, 1.0)], step=step)
    tracker.close("FINISHED")


def test_each_step_is_one_line_that_is_on_disk_at_once(tmp_path: Path) -> None:
    tracker = LocalTracker(tmp_path, RECORD, CONFIG)
    tracker.log({"reward/mean": 0.5}, step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward/mean": 0.5}\n'
    tracker.close("FINISHED")


def test_a_resumed_run_drops_only_the_steps_that_are_made_again(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    record(tmp_path, range(4, 7), resumed_step=3, value=0.5)
    assert series(read_metrics(tmp_path / "metrics.jsonl"), "reward/mean") == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5), (6, 6.5),
    ]  # fmt: skip
    assert [row["step"] for row in read_lines(tmp_path / "rollouts.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_fresh_run_starts_with_empty_files(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    record(tmp_path, range(1, 2))
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1]


def test_a_line_cut_by_a_crash_is_dropped(tmp_path: Path) -> None:
    record(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    record(tmp_path, range(3, 4), resumed_step=2)
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_lines_are_json_that_any_reader_takes_also_for_values_that_are_not_finite(tmp_path: Path) -> None:
    tracker = LocalTracker(tmp_path, RECORD, CONFIG)
    tracker.log({"a": math.nan, "b": math.inf, "c": 1.0}, step=1)
    tracker.close("FINISHED")

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "a": None, "b": None, "c": 1.0}
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[0]["a"])


def test_lines_of_one_step_are_read_as_one_row(tmp_path: Path) -> None:
    tracker = LocalTracker(tmp_path, RECORD, CONFIG)
    tracker.log({"reward/mean": 0.5}, step=2)
    tracker.log({"eval/accuracy": 0.7}, step=2)
    tracker.close("FINISHED")
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2, "reward/mean": 0.5, "eval/accuracy": 0.7}]


def test_config_environment_and_commit_lie_beside_the_metrics(tmp_path: Path) -> None:
    record(tmp_path, range(0))
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == RECORD.config
    assert (tmp_path / "environment.txt").read_text().splitlines() == ["Python  3.11", "git commit  0123abc"]
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
