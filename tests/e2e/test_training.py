"""The default run, cut short: what it leaves behind, and that a killed one goes on as if nothing had happened."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import (
    CUT,
    RUN_S,
    assert_gone,
    command,
    family,
    megarl,
    metrics,
    numbers,
    segments,
    started,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_S + 60)]

NAME = "moe-grpo"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """(folder, printed text) of a run that nothing disturbed."""
    output = tmp_path_factory.mktemp("whole")
    done = megarl(*command("train", output, *CUT))
    assert done.returncode == 0, done.stderr
    return output / NAME, done.stdout


def test_every_step_has_a_reward_and_engine_and_trainer_agree(whole: tuple[Path, str]) -> None:
    rows = metrics(whole[0])
    assert sorted(rows) == [0, 1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        assert 0.0 < rows[step]["reward/mean"] < 1.0
        assert rows[step]["policy/mismatch_kl"] < 1e-6
        assert rows[step]["sync/probe_max_diff"] < 1e-4
        assert rows[step]["staleness/max"] == 0
    assert [step for step in rows if "eval/accuracy" in rows[step]] == [0, 2, 4]


def test_every_sampled_turn_carries_the_version_of_its_step(whole: tuple[Path, str]) -> None:
    rollouts = [json.loads(line) for line in (whole[0] / "rollouts.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rollouts} == {1, 2, 3, 4}
    assert all(row["version"] == row["step"] - 1 for row in rollouts)


def test_a_run_leaves_its_curves_its_environment_and_its_checkpoints(whole: tuple[Path, str]) -> None:
    folder, _ = whole
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "Megatron-Core" in (folder / "environment.txt").read_text()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]


def test_the_summary_says_what_a_person_wants_to_know(whole: tuple[Path, str]) -> None:
    _, text = whole
    assert "step 4/4" in text
    for words in ("held-out accuracy", "mismatch_kl", "time", "step-000004", "curves.png", "mlflow ui"):
        assert words in text


def test_mlflow_has_the_run_with_its_metrics_and_config(whole: tuple[Path, str]) -> None:
    from mlflow import MlflowClient

    folder, _ = whole
    client = MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.optimizer.lr"] == "0.0003"
    history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "reward/mean")}
    assert history == {step: row["reward/mean"] for step, row in metrics(folder).items() if step}
    assert {"config.yaml", "curves.png", "environment.txt"} <= {a.path for a in client.list_artifacts(run.info.run_id)}


@pytest.mark.parametrize("moment", ["in the middle of a step", "while a checkpoint is written"])
def test_a_killed_run_goes_on_with_exactly_the_same_numbers(
    moment: str, whole: tuple[Path, str], tmp_path: Path
) -> None:
    before = segments()
    arguments, folder = command("train", tmp_path, *CUT), tmp_path / NAME
    with started(arguments) as process:
        checkpoints = folder / "checkpoints"
        if moment == "in the middle of a step":
            wait_until(lambda: 3 in metrics(folder), "third step")
        else:
            wait_until(lambda: list(checkpoints.glob(".step-000002.tmp-*")), "half-done checkpoint")
        children = family(process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert_gone(children, before | segments())
    done = megarl(*arguments)
    assert done.returncode == 0, done.stderr
    assert numbers(folder) == numbers(whole[0])
    assert segments() <= before
