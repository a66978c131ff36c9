from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.tracking.tracker import METRICS, better, eval_metrics, step_metrics
from megarl.types import EvalReport, Sample, TrajectoryGroup, UpdateMetrics
from tests.tracking.records import REPORT, TIMES, attempt, group

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def sample(version: int = 4, *, in_loss: bool = True) -> Sample:
    mask = np.array([False, True, True])
    ids, zeros = np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32)
    return Sample(ids, mask, zeros, group=0, version=version, reward=1.0, in_loss=in_loss)


def test_rewards_are_averaged_over_those_that_could_be_computed() -> None:
    metrics = step_metrics([group(0, 1.0, 0.0, None, math.nan)], [], [], REPORT, TIMES)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == 0.5
    assert metrics["reward/verifier_error"] == 2
    assert metrics["reward_part/task"] == 0.5


def test_what_had_nothing_to_measure_is_left_out_and_not_zero() -> None:
    metrics = step_metrics([group(0, None, None)], [], [], replace(REPORT, probe_max_diff=None), TIMES)
    assert metrics["reward/verifier_error"] == 2
    for name in ("reward/mean", "reward/std", "staleness/mean", "policy/loss", "sync/probe_max_diff"):
        assert name not in metrics


def test_a_group_without_a_spread_of_rewards_is_counted() -> None:
    groups = [group(0, 1.0, 1.0), group(1, 0.0, 1.0), group(2, 0.5, None), group(3, 0.0, 1.0)]
    assert step_metrics(groups, [], [], REPORT, TIMES)["groups/zero_spread"] == 0.5


def test_token_statistics_count_sampled_tokens() -> None:
    attempts = (attempt(0, 1.0, 2), attempt(0, 0.0, 4, status="truncated"))
    metrics = step_metrics([TrajectoryGroup(attempts[0].prompt, attempts)], [sample()], [], REPORT, TIMES)
    assert metrics["tokens/completion_mean"] == 3
    assert metrics["tokens/completion_max"] == 4
    assert metrics["tokens/prompt_mean"] == 3
    assert metrics["tokens/truncated_share"] == 0.5
    assert metrics["tokens/loss"] == 2
    assert metrics["tokens_per_s"] == 3  # 6 tokens in 2 s


def test_staleness_is_counted_from_the_weights_before_the_update() -> None:
    metrics = step_metrics([group(0, 1.0)], [sample(4), sample(2)], [], REPORT, TIMES)
    assert metrics["staleness/mean"] == 1
    assert metrics["staleness/max"] == 2


def test_policy_metrics_are_means_over_the_updates_that_were_made() -> None:
    updates = [
        UpdateMetrics({"loss": 1.0, "lr": 0.1}),
        UpdateMetrics({"loss": 3.0, "lr": 0.2}),
        UpdateMetrics({"loss": math.inf}, skipped=True),
    ]
    metrics = step_metrics([group(0, 1.0)], [], updates, REPORT, TIMES)
    assert metrics["policy/loss"] == 2
    assert metrics["policy/lr"] == 0.2
    assert metrics["updates/skipped"] == 1


def test_samples_out_of_the_loss_and_invalid_trajectories_are_counted() -> None:
    broken = attempt(0, None, status="invalid")
    groups = [TrajectoryGroup(broken.prompt, (broken,))]
    metrics = step_metrics(groups, [sample(), sample(in_loss=False)], [], REPORT, TIMES)
    assert metrics["samples/invalid"] == 1
    assert metrics["samples/skipped"] == 1


def test_every_metric_that_is_made_is_described() -> None:
    made = step_metrics([group(0, 1.0)], [sample()], [UpdateMetrics({"loss": 1.0})], REPORT, TIMES)
    made |= eval_metrics(EvalReport(5, 0.5, 10, 3.0))
    assert {name for name in made if name not in METRICS} == {"reward_part/task"}


def test_the_documentation_says_what_the_code_says() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (.*?) \| (.*?) \| (.*?) \|$", DOCS.read_text(), flags=re.MULTILINE)
    said = {name: (unit, direction, text) for name, unit, direction, text in rows}
    assert said == {name: (m.unit or "1", m.better, m.text) for name, m in METRICS.items()}


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("eval/accuracy", "higher"),
        ("reward/mean", "higher"),
        ("reward_part/length", "higher"),
        ("policy/mismatch_kl", "lower"),
        ("time/step_s", "lower"),
        ("policy/entropy", "neither"),
        ("mine/own", "neither"),
    ],
)
def test_the_better_direction_is_known(name: str, direction: str) -> None:
    assert better(name) == direction
