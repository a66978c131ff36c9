from __future__ import annotations

from collections.abc import Sequence

import pytest

from megarl.config import EvalConfig
from megarl.rollout.evaluator import HeldOutEvaluator
from megarl.types import Prompt, Trajectory, TrajectoryGroup, Turn


class Task:
    def heldout(self) -> list[Prompt]:
        return [Prompt(number, (), "1") for number in range(4)]

    def verify(self, prompt: Prompt, answer: str) -> float:
        return float(prompt.target == answer)


class Env:
    def __init__(self, statuses: Sequence[str]) -> None:
        self._statuses = statuses

    async def run(self, prompts: Sequence[Prompt], *, step: int, group_size: int) -> list[TrajectoryGroup]:
        return [
            TrajectoryGroup(p, (Trajectory(p, [Turn((1,), (2, 3), (-0.1, -0.1), step, "stop")], "1", status),))  # type: ignore[arg-type]
            for p, status in zip(prompts, self._statuses, strict=True)
        ]


class Tracker:
    def log(self, metrics: dict[str, float], *, step: int) -> None: ...


def _evaluator(*statuses: str) -> HeldOutEvaluator:
    return HeldOutEvaluator(Task(), Env(statuses), EvalConfig(), max_steps=1, tracker=Tracker())  # type: ignore[arg-type]


async def test_an_answer_the_engine_never_gave_is_not_a_wrong_one() -> None:
    report = await _evaluator("finished", "invalid", "finished", "invalid").run(step=0)
    assert (report.accuracy, report.num_prompts, report.mean_completion_tokens) == (1.0, 2, 2.0)


async def test_no_answers_at_all_is_an_error_not_an_accuracy() -> None:
    with pytest.raises(RuntimeError, match="none of the 4 held-out problems"):
        await _evaluator(*["invalid"] * 4).run(step=0)
