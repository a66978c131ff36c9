"""What a person sees while a run goes on: one line per step, and a progress bar in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from megarl.types import TrajectoryGroup

_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("mismatch_kl", "policy/mismatch_kl", "{:.1e}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("grad", "policy/grad_norm", "{:.3g}"),
    ("tokens", "tokens/completion_mean", "{:.1f}"),
)
_COUNTED = (
    ("without reward", "reward/verifier_error"),
    ("invalid", "samples/invalid"),
    ("updates skipped", "updates/skipped"),
)
"""Told only when there are any."""
_PHASES = ("generate", "score", "train", "sync")


class ConsoleTracker:
    """Prints; records nothing.

    Args:
        max_steps: where the bar ends.
        start_step: where it starts, in a resumed run.
        console: tests give their own.
    """

    def __init__(self, max_steps: int, *, start_step: int = 0, console: Console | None = None) -> None:
        self.run_id = ""
        self._max_steps = max_steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("[progress.percentage]{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("step", total=max_steps, completed=start_step)
        if self._progress.console.is_terminal:
            self._progress.start()

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """One line for a step, one for an evaluation."""
        if "time/step_s" in metrics:
            self._say(step_line(metrics, step=step, max_steps=self._max_steps))
            self._progress.update(self._task, completed=step)
        if "eval/accuracy" in metrics:
            self._say(eval_line(metrics, step=step))

    def log_rollouts(self, groups: Sequence[TrajectoryGroup], *, step: int) -> None:
        """Nothing: rollouts are in the run folder."""

    def log_file(self, path: Path) -> None:
        """Nothing."""

    def close(self, status: str) -> None:
        """Leave the bar as it is and give the terminal back."""
        self._progress.stop()

    def _say(self, line: str) -> None:
        self._progress.console.print(Text(line), soft_wrap=True)


def step_line(metrics: dict[str, float], *, step: int, max_steps: int) -> str:
    """Example: ``step   7/100  reward 0.612  mismatch_kl 3.1e-09  ...  1.25 s: generate 52%, train 38%, sync 8%``."""
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}"]
    parts += [f"{label} {form.format(metrics[name])}" for label, name, form in _SHOWN if name in metrics]
    parts += [f"{label} {metrics[name]:.0f}" for label, name in _COUNTED if metrics.get(name)]
    step_s = metrics["time/step_s"]
    shares = {phase: metrics.get(f"time/{phase}_s", 0.0) / step_s for phase in _PHASES}
    where = ", ".join(f"{phase} {share:.0%}" for phase, share in shares.items() if share >= 0.01)
    return "  ".join([*parts, f"{step_s:.2f} s: {where}" if where else f"{step_s:.2f} s"])


def eval_line(metrics: dict[str, float], *, step: int) -> str:
    """Example: ``step 25  held-out accuracy 81.2%  (512 problems)``."""
    asked = f"  ({metrics['eval/prompts']:.0f} problems)" if "eval/prompts" in metrics else ""
    return f"step {step}  held-out accuracy {metrics['eval/accuracy']:.1%}{asked}"
