"""Held-out accuracy, on problems that training never sees."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import EvalConfig
from megarl.data.prompts import Task
from megarl.interfaces import Env, Tracker
from megarl.tracking.tracker import eval_metrics
from megarl.types import EvalReport, TrajectoryGroup


class HeldOutEvaluator:
    """An ``Evaluator``: one answer to every held-out problem, at the first step, the last, and on schedule between."""

    def __init__(self, task: Task, env: Env, config: EvalConfig, *, max_steps: int, tracker: Tracker) -> None:
        self._task, self._env, self._config = task, env, config
        self._max_steps, self._tracker = max_steps, tracker

    async def maybe_run(self, step: int) -> EvalReport | None:
        """Evaluate when the schedule says so."""
        if step % self._config.every and step != self._max_steps:
            return None
        return await self.run(step)

    async def run(self, step: int) -> EvalReport:
        """Evaluate now and log it."""
        groups = await self._env.run(self._task.heldout(), step=step, group_size=1)
        report = self._report(step, groups)
        self._tracker.log(eval_metrics(report), step=step)
        return report

    def _report(self, step: int, groups: Sequence[TrajectoryGroup]) -> EvalReport:
        """An answer that the engine never gave says nothing about the policy: it is left out, not counted as wrong."""
        answers = [t for group in groups for t in group.trajectories if t.status != "invalid"]
        if not answers:
            raise RuntimeError(f"none of the {len(groups)} held-out problems got a valid answer from the engine")
        right = sum(self._task.verify(t.prompt, t.text) >= 1.0 for t in answers)
        tokens = sum(len(turn.completion_ids) for t in answers for turn in t.turns)
        return EvalReport(step, right / len(answers), len(answers), tokens / len(answers))
