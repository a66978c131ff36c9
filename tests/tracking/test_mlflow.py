from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import MlflowConfig, TrackingConfig
from megarl.tracking import mlflow as tracking_mlflow
from megarl.tracking.mlflow import MlflowTracker
from megarl.tracking.mlflow_store import _make_store, connect, open_command, sqlite_file, store_uri
from tests.tracking.records import RECORD, group

CONFIG = TrackingConfig(rollouts_every=1, rollouts_per_table=2)


def read(store: str, run_id: str) -> Any:
    return connect(store).get_run(run_id)


def artifact(store: str, run_id: str, name: str) -> str:
    folder = read(store, run_id).info.artifact_uri.removeprefix("file://")
    return (Path(folder) / name).read_text()


def test_a_run_is_recorded_whole(store: str, tmp_path: Path) -> None:
    (tmp_path / "curves.png").write_bytes(b"png")
    tracker = MlflowTracker(RECORD, CONFIG, uri=store)
    tracker.log({"reward/mean": 0.25, "odd%name": 3.0, "nan": math.nan, "inf": math.inf}, step=1)
    tracker.log({"reward/mean": 0.5}, step=2)
    tracker.log_rollouts([group(0, 1.0, 0.0)], step=1)
    tracker.log_rollouts([group(1, 1.0, 0.0)], step=2)
    tracker.log_file(tmp_path / "curves.png")
    tracker.close("FINISHED")

    run = read(store, tracker.run_id)
    assert run.info.run_name == "tiny"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "0", "trainer.optimizer.lr": "0.001"}
    assert run.data.tags["version.torch"] == "2.13.0"
    assert run.data.tags["megarl.git_commit"] == "0123abc"
    assert math.isnan(run.data.metrics["nan"])
    assert math.isnan(run.data.metrics["inf"])
    assert 3.0 in run.data.metrics.values()
    history = connect(store).get_metric_history(tracker.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5)]
    table = json.loads(artifact(store, tracker.run_id, "rollouts/steps_000001-000100.json"))
    assert [row[table["columns"].index("completion")] for row in table["data"]] == ["answer 1.0", "answer 0.0"] * 2
    assert artifact(store, tracker.run_id, "curves.png") == "png"
    assert "lr: 0.001" in artifact(store, tracker.run_id, "config.yaml")
    assert artifact(store, tracker.run_id, "environment.txt").startswith("Python  3.11")


def test_many_keys_and_long_values_and_refused_names_are_all_recorded(store: str) -> None:
    config = {f"key{number}": number for number in range(250)}
    config |= {"long": "x" * 7000, "longer": "y" * 20_000, "odd%key": 1, "odd#key": 2}
    tracker = MlflowTracker(replace(RECORD, config=config), CONFIG, uri=store)
    tracker.close("FINISHED")
    params = read(store, tracker.run_id).data.params
    assert len(params) == 254
    assert params["key249"] == "249"
    assert params["long"].startswith("x" * 5000)
    assert "7000 characters" in params["long"]
    assert "x" * 7000 in artifact(store, tracker.run_id, "config.yaml")
    assert read(store, tracker.run_id).info.status == "FINISHED"


def test_a_resumed_run_goes_on_in_the_same_record(store: str) -> None:
    first = MlflowTracker(RECORD, CONFIG, uri=store)
    first.log({"a": 1.0}, step=1)
    first.close("KILLED")
    assert read(store, first.run_id).info.status == "KILLED"
    changed = replace(RECORD, config={**RECORD.config, "seed": 1, "new": "yes"})
    second = MlflowTracker(changed, CONFIG, uri=store, run_id=first.run_id)
    second.log({"a": 2.0}, step=2)
    second.close("FINISHED")
    run = read(store, first.run_id)
    assert second.run_id == first.run_id
    assert run.info.status == "FINISHED"
    assert [m.value for m in connect(store).get_metric_history(first.run_id, "a")] == [1.0, 2.0]
    assert run.data.params["new"] == "yes"
    assert run.data.tags["megarl.changed_when_resumed"] == "seed: 0 -> 1"


def test_a_run_that_is_not_in_the_store_is_told_and_a_new_one_started(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MlflowTracker(RECORD, CONFIG, uri=store, run_id="0" * 32)
    tracker.close("FINISHED")
    assert "cannot be continued" in caplog.text
    assert tracker.run_id != "0" * 32
    assert read(store, tracker.run_id).info.status == "FINISHED"


def test_a_server_that_is_down_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        start = time.perf_counter()
        tracker = MlflowTracker(RECORD, CONFIG, uri=f"http://127.0.0.1:{taken.getsockname()[1]}")
        for step in range(50):
            tracker.log({"a": 1.0}, step=step)
        assert time.perf_counter() - start < 1
        tracker.close("FINISHED")
        assert time.perf_counter() - start < 20
    assert tracker.run_id == ""
    assert [record.levelname for record in caplog.records if record.name.startswith("megarl")] == ["WARNING"] * 2
    assert "52 records did not get through" in caplog.text


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_server_that_never_answers_holds_the_end_up_only_to_the_deadline(
    silent_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_mlflow, "DEADLINE_S", {"KILLED": 1.0})
    start = time.perf_counter()
    tracker = MlflowTracker(RECORD, CONFIG, uri=silent_server)
    for step in range(2 * tracking_mlflow.CAPACITY):
        tracker.log({"a": 1.0}, step=step)
    tracker.close("KILLED")
    assert time.perf_counter() - start < 5


def test_a_store_that_was_not_finished_is_not_left_behind(tmp_path: Path) -> None:
    def killed(tracking_uri: str) -> Any:
        file = sqlite_file(tracking_uri)
        assert file is not None
        file.write_bytes(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        _make_store(tmp_path / "mlflow.db", killed)
    assert list(tmp_path.iterdir()) == []


def test_the_default_store_and_its_artifacts_lie_beside_the_runs(store: str, tmp_path: Path) -> None:
    uri = store_uri(MlflowConfig(), tmp_path)
    assert uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert store_uri(MlflowConfig(uri="http://tracking:5000"), tmp_path) == "http://tracking:5000"
    tracker = MlflowTracker(RECORD, CONFIG, uri=store)
    tracker.close("FINISHED")
    file = sqlite_file(store)
    assert file is not None
    assert read(store, tracker.run_id).info.artifact_uri.startswith(f"file://{file.parent}/mlflow-artifacts/")
    assert not Path("mlruns").exists()


def test_the_command_that_opens_the_records_survives_the_shell() -> None:
    assert open_command("sqlite:////a b/mlflow.db") == "mlflow ui --backend-store-uri 'sqlite:////a b/mlflow.db'"
    assert open_command("https://me:secret@tracking") == "https://me:***@tracking"


def test_what_the_user_set_for_mlflow_stays(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "33")
    connect(store)
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "33"
