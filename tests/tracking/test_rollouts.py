from __future__ import annotations

import pytest

from megarl.config import TrackingConfig
from megarl.tracking.rollouts import rollout_rows
from tests.tracking.records import group


def test_rows_take_one_attempt_of_every_prompt_before_a_second() -> None:
    groups = [group(0, 1.0, 0.0), group(1, 0.0), group(2, 0.5, 0.25)]
    rows = rollout_rows(groups, step=10, config=TrackingConfig(rollouts_every=10, rollouts_per_table=4))
    assert [(row["prompt_number"], row["attempt"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert rows[0]["prompt"] == "user: 0 + 1 = ?"
    assert rows[0]["completion"] == "answer 1.0"
    assert rows[3]["reward"] == 0.0
    assert rows[0]["completion_tokens"] == 2


@pytest.mark.parametrize(("every", "step", "count"), [(10, 5, 0), (10, 10, 1), (0, 10, 0), (1, 3, 1)])
def test_rows_are_made_only_when_due(every: int, step: int, count: int) -> None:
    config = TrackingConfig(rollouts_every=every, rollouts_per_table=1)
    assert len(rollout_rows([group(0, 1.0)], step=step, config=config)) == count
