from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from megarl.config import RunConfig, from_dict, load
from megarl.tracking.mlflow_store import connect
from megarl.tracking.record import describe_run, flatten, without_password
from megarl.tracking.run import add_curves, mlflow_uri, open_tracker
from megarl.tracking.summary import Places, run_summary
from megarl.types import LoopState
from tests.tracking.records import RECORD, TIMES, write_run


def config(output: Path, **mlflow: object) -> RunConfig:
    return from_dict(
        {
            "name": "tiny",
            "max_steps": 2,
            "prompts_per_step": 1,
            "group_size": 2,
            "data": {"task": "reasoning_gym/chain_sum", "options": {"a.b": 1}},
            "trainer": {"model": "nowhere"},
            "tracking": {"mlflow": mlflow},
            "output": str(output),
        }
    )


def test_a_run_is_recorded_and_summed_up(tmp_path: Path) -> None:
    settings = config(tmp_path)
    tracker = open_tracker(settings, None)
    tracker.log({"eval/accuracy": 0.25}, step=0)
    for step in (1, 2):
        tracker.log({**TIMES, "reward/mean": 0.3 * step, "policy/mismatch_kl": 1e-8 / step}, step=step)
    tracker.log({"eval/accuracy": 0.75}, step=2)
    add_curves(settings, tracker)
    tracker.close("FINISHED")

    curves = settings.run_folder / "curves.png"
    places = Places(tmp_path / "step-2", curves, tracker.run_id, mlflow_uri(settings))
    summary = run_summary(settings.run_folder, places)
    for fact in (
        "tiny: 2 steps",
        "25.0% -> 75.0% (+50.0 points, step 0 to 2)",
        "0.300 -> 0.600",
        "5.0e-09 at the end, at most 1.0e-08 (step 1)",
        "4.0 s in steps: generate 50.0%, train 25.0%, overhead 25.0%",
        f"{tmp_path}/step-2",
        str(curves),
        tracker.run_id,
        f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db",
    ):
        assert fact in summary
    run = connect(mlflow_uri(settings)).get_run(tracker.run_id)
    assert run.data.params["data.task"] == "reasoning_gym/chain_sum"
    assert run.data.metrics["eval/accuracy"] == 0.75
    assert (Path(run.info.artifact_uri.removeprefix("file://")) / "curves.png").read_bytes() == curves.read_bytes()
    assert load(settings.run_folder / "config.yaml") == settings


def test_a_store_that_cannot_be_reached_leaves_a_run_with_its_folder(tmp_path: Path) -> None:
    settings = config(tmp_path, uri="http://me:secret@127.0.0.1:9")
    start = time.perf_counter()
    tracker = open_tracker(settings, LoopState(step=1, prompts_done=1, tracker_run="a" * 32))
    tracker.log({**TIMES, "reward/mean": 0.5}, step=2)
    tracker.close("FINISHED")
    assert time.perf_counter() - start < 20
    assert tracker.run_id == "a" * 32
    assert '"reward/mean": 0.5' in (settings.run_folder / "metrics.jsonl").read_text()
    assert "secret" not in (settings.run_folder / "config.yaml").read_text()
    summary = run_summary(settings.run_folder, Places(mlflow_uri=mlflow_uri(settings)))
    assert "none: http://me:***@127.0.0.1:9 was not reached" in summary


def test_a_picture_that_cannot_be_drawn_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(tmp_path, enabled=False)
    write_run(settings.run_folder, [])
    (settings.run_folder / "curves.png").mkdir()
    tracker = open_tracker(settings, None)
    add_curves(settings, tracker)
    tracker.close("FINISHED")
    assert "curves: IsADirectoryError" in caplog.text
    assert mlflow_uri(settings) == ""


def test_a_flat_config_keeps_every_leaf_apart() -> None:
    flat = flatten({"a": {"b": 1}, "a.b": 2, "rewards": [{"name": "task"}], "list": [1, 2], "none": None, "no": {}})
    assert flat == {
        "a.b": "1",
        '"a.b"': "2",
        "rewards.0.name": "task",
        "list": "[1, 2]",
        "none": "null",
        "no": "{}",
    }


def test_a_record_holds_no_password(tmp_path: Path) -> None:
    record = describe_run(config(tmp_path, uri="http://me:secret@host/path"), [], "abc")
    assert "secret" not in yaml.safe_dump(record.config)
    assert record.config["tracking"]["mlflow"]["uri"] == "http://me:***@host/path"
    assert without_password("sqlite:///a/b.db") == "sqlite:///a/b.db"
    assert RECORD.config_yaml().startswith("seed: 0")
