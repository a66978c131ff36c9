"""The default run, cut short: what it leaves behind, and that a killed one goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.tracking.mlflow_names import accepted_name, accepted_value
from megarl.tracking.record import flatten
from tests.e2e.runs import (
    CUT,
    NAME,
    RUN_S,
    Run,
    assert_no_process,
    assert_nothing,
    assert_proven,
    command,
    metrics,
    newest_checkpoint,
    numbers,
    started,
    traces,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_S + 60)]


def test_every_step_has_a_reward_and_engine_and_trainer_agree(whole: Run) -> None:
    rows = metrics(whole.folder)
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert_proven(whole.folder, 4)
    for step in (1, 2, 3, 4):
        assert 0.0 < rows[step]["reward/mean"] < 1.0
        assert rows[step]["staleness/max"] == 0
    assert [step for step in rows if "eval/accuracy" in rows[step]] == [0, 2, 4]


def test_every_sampled_turn_carries_the_version_of_its_step(whole: Run) -> None:
    rollouts = [json.loads(line) for line in (whole.folder / "rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rollouts] == [step for step in (1, 2, 3, 4) for _ in range(128)]
    assert all(row["version"] == row["step"] - 1 for row in rollouts)


def test_a_run_leaves_its_curves_its_environment_and_its_checkpoints(whole: Run) -> None:
    assert (whole.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "Megatron-Core" in (whole.folder / "environment.txt").read_text()
    assert sorted(path.name for path in (whole.folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]


def test_the_summary_says_what_a_person_wants_to_know(whole: Run) -> None:
    rows = metrics(whole.folder)
    assert "step 4/4" in whole.text
    assert f"{rows[0]['eval/accuracy']:.1%} -> {rows[4]['eval/accuracy']:.1%}" in whole.text
    assert f"mlflow ui --backend-store-uri sqlite:///{whole.folder.parent / 'mlflow.db'}" in whole.text
    for words in ("mismatch_kl", "time", str(whole.folder / "checkpoints/step-000004"), "curves.png"):
        assert words in whole.text


def _mlflow_run(output: Path) -> tuple[Any, Any]:
    """(client, the only run in the store)"""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return client, run


def test_mlflow_has_the_run_with_its_metrics_config_and_environment(whole: Run) -> None:
    client, run = _mlflow_run(whole.folder.parent)
    assert run.info.status == "FINISHED"
    config = flatten(yaml.safe_load((whole.folder / "config.yaml").read_text()))
    assert run.data.params == {accepted_name(key): accepted_value(value) for key, value in config.items()}
    assert run.data.params["trainer.optimizer.lr"] == "0.0003"
    recorded: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            recorded.setdefault(point.step, {"step": point.step})[name] = point.value
    assert recorded == metrics(whole.folder)
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "curves.png", "environment.txt", "rollouts"} <= files


def _kill_driver(process: subprocess.Popen[str]) -> None:
    process.kill()


def _kill_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("half_done", "kill"),
    [("step", _kill_driver), ("checkpoint", _kill_group)],
    ids=["driver in a step", "group while a checkpoint is written"],
)
def test_a_killed_run_goes_on_with_exactly_the_same_numbers(
    half_done: str, kill: Callable[[subprocess.Popen[str]], None], whole: Run, tmp_path: Path
) -> None:
    arguments, folder = command("train", tmp_path, *CUT), tmp_path / NAME
    with started(arguments) as process:
        if half_done == "step":
            wait_for(process, lambda: 3 in metrics(folder), "third step")
        else:
            wait_for(process, lambda: list(folder.glob("checkpoints/.step-000004.tmp-*")), "half-done checkpoint")
        killed = traces(process)
        kill(process)
        process.communicate()
        assert_no_process(killed)
    assert newest_checkpoint(folder) == 2
    assert (4 in metrics(folder)) == (half_done == "checkpoint")
    _, before = _mlflow_run(tmp_path)

    with started(arguments) as process:
        continued = traces(process)
        out, err = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, err
    assert "step 3/4" in out
    assert "step 2/4" not in out
    assert numbers(folder) == numbers(whole.folder)
    assert_nothing(killed)
    assert_nothing(continued)
    _, after = _mlflow_run(tmp_path)
    assert (after.info.run_id, after.info.status) == (before.info.run_id, "FINISHED")
