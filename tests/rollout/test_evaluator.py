from __future__ import annotations

from collections.abc import Sequence

import pytest

from megarl.config import EvalConfig
from megarl.rollout.evaluator import HeldOutEvaluator
from megarl.types import Prompt, Trajectory, TrajectoryGroup, Turn


class Task:
    def heldout(self) -> list[Prompt]:
        return [Prompt(number, (), str(number % 2)) for number in range(4)]

    def verify(self, prompt: Prompt, answer: str) -> float:
        return 1.0 if prompt.target == answer else 0.5


class Env:
    """Always answers 1."""

    async def run(self, prompts: Sequence[Prompt], *, step: int, group_size: int) -> list[TrajectoryGroup]:
        assert group_size == 1
        turn = Turn((1,), (2, 3, 4), (-0.1,) * 3, step, "stop")
        return [TrajectoryGroup(p, (Trajectory(p, [turn], "1", "finished"),)) for p in prompts]


class Tracker:
    def __init__(self) -> None:
        self.logged: list[tuple[int, float]] = []

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self.logged.append((step, metrics["eval/accuracy"]))


def _evaluator(tracker: Tracker, every: int = 3, max_steps: int = 7) -> HeldOutEvaluator:
    return HeldOutEvaluator(Task(), Env(), EvalConfig(every=every), max_steps=max_steps, tracker=tracker)  # type: ignore[arg-type]


async def test_accuracy_counts_fully_right_answers_only() -> None:
    report = await _evaluator(Tracker()).run(step=5)
    assert (report.version, report.accuracy, report.num_prompts, report.mean_completion_tokens) == (5, 0.5, 4, 3.0)


async def test_the_first_and_the_last_step_are_always_evaluated() -> None:
    tracker = Tracker()
    evaluator = _evaluator(tracker)
    ran = [step for step in range(8) if await evaluator.maybe_run(step) is not None]
    assert ran == [0, 3, 6, 7]
    assert tracker.logged == [(step, pytest.approx(0.5)) for step in ran]
