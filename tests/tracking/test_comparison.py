from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megarl.config import TrackingConfig
from megarl.tracking.compare import compare_runs
from megarl.tracking.comparison import Course, course, differences, excerpts
from megarl.tracking.mlflow import MlflowTracker
from tests.tracking.records import RECORD, write_run

SLOW = ['{"step": 1, "reward/mean": 0.2, "time/step_s": 2.0}', '{"step": 3, "reward/mean": 0.4, "time/step_s": 1.0}']
FAST = ['{"step": 1, "reward/mean": 0.9}', '{"step": 2, "reward/mean": 0.8}', '{"step": 2, "eval/accuracy": 0.7}']
HOSTILE = "</td><script>alert(1)</script>"


def test_a_course_is_start_best_last_and_area() -> None:
    points = [(0, 1.0), (10, 3.0), (20, 2.0)]
    assert course(points, "higher") == Course(1.0, 3.0, 2.0, 45.0)
    assert course(points, "lower") == Course(1.0, 1.0, 2.0, 45.0)
    assert course(points, "neither") == Course(1.0, None, 2.0, 45.0)
    assert course([(5, 2.0)], "higher") == Course(2.0, 2.0, 2.0, None)
    assert course([], "higher") is None


def test_only_keys_that_differ_are_told() -> None:
    found = differences([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}])
    assert found == {"b": ("2", "3"), "c": (None, "4")}


def test_long_values_are_shown_where_they_begin_to_differ() -> None:
    one, other = excerpts(["x" * 500 + "one", "x" * 500 + "other"], 20)
    assert one.endswith("one")
    assert other.endswith("other")
    assert excerpts(["a\x1b[31m", None], 20) == ["a\\x1b[31m", "-"]


def test_run_folders_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = write_run(tmp_path / "slow", SLOW, "seed: 0\nlr: 0.1\n")
    fast = write_run(tmp_path / "fast", FAST, "seed: 0\nlr: 0.2\n")
    comparison = compare_runs([str(slow), str(fast)], output=tmp_path / "out")
    assert comparison.labels == ["slow", "fast"]
    assert comparison.differences == {"lr": ("0.1", "0.2")}
    assert comparison.courses["reward/mean"][0] == Course(0.2, 0.4, 0.4, pytest.approx(0.6))
    assert comparison.courses["eval/accuracy"] == (None, Course(0.7, 0.7, 0.7, None))
    assert next(iter(comparison.courses)) == "eval/accuracy"
    assert comparison.best_last("reward/mean") == {1}
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert re.search(r"lr +0\.1 +0\.2", printed)
    assert re.search(r"reward/mean +↑ +slow +0\.2 +0\.4 +0\.4 +0\.6", printed)
    assert "seed" not in printed


def test_a_folder_and_a_run_in_mlflow_are_compared(tmp_path: Path, store: str) -> None:
    tracker = MlflowTracker(RECORD, TrackingConfig(), uri=store)
    tracker.log({"reward/mean": 0.1}, step=1)
    tracker.log({"reward/mean": 0.2}, step=2)
    tracker.log({"reward/mean": 0.3}, step=2)  # made again by a resumed run
    tracker.close("FINISHED")
    folder = write_run(tmp_path / "fast", FAST)
    comparison = compare_runs([tracker.run_id, str(folder)], uri=store, output=tmp_path / "out")
    assert comparison.labels == ["tiny", "fast"]
    assert comparison.runs[0].metrics["reward/mean"] == ((1, 0.1), (2, 0.3))
    assert comparison.differences == {"trainer.optimizer.lr": ("0.001", None)}


def test_runs_of_one_name_keep_apart(tmp_path: Path) -> None:
    one, other = (str(write_run(tmp_path / parent / "same", SLOW)) for parent in ("a", "b"))
    assert compare_runs([one, other, one], output=tmp_path / "out").labels == [one, other, f"{one} (2)"]


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_is_self_contained_and_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = write_run(tmp_path / "_<b>$x$ $", SLOW, f"seed: 1\nprompt: '{HOSTILE}'\n")
    other = write_run(tmp_path / "other", [f'{{"step": 1, "{HOSTILE}": 1.0}}'])
    compare_runs([str(hostile), str(other)], output=tmp_path / "out")
    text = (tmp_path / "out" / "comparison.html").read_text()
    page = Page()
    page.feed(text)
    assert not page.tags & {"script", "b", "link", "iframe"}
    assert page.sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert b"<script" not in base64.b64decode(page.sources[0].partition(",")[2])


def test_the_page_is_the_same_every_time(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run", SLOW))
    pages = set()
    for number in range(2):
        compare_runs([run], output=tmp_path / str(number))
        pages.add((tmp_path / str(number) / "comparison.html").read_text())
    assert len(pages) == 1


def test_an_unknown_run_is_refused_with_close_ones(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "moe-grpo", SLOW)
    with pytest.raises(ValueError, match=r"'runs/moe-grop' must be a folder .* did you mean runs/moe-grpo\?"):
        compare_runs(["runs/moe-grop"], output=tmp_path / "out")
    with pytest.raises(ValueError, match=r"'moe' must be a folder with a metrics.jsonl or a run in MLflow"):
        compare_runs(["moe"], uri=store, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "runs" / "mlflow.db").exists()


def test_a_name_that_several_runs_have_is_refused_with_their_ids(tmp_path: Path, store: str) -> None:
    trackers = [MlflowTracker(RECORD, TrackingConfig(), uri=store) for _ in range(2)]
    for tracker in trackers:
        tracker.close("FINISHED")
    with pytest.raises(ValueError, match="must name one run") as refused:
        compare_runs(["tiny"], uri=store, output=tmp_path / "out")
    assert all(tracker.run_id in str(refused.value) for tracker in trackers)
