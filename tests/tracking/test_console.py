from __future__ import annotations

import io

from rich.console import Console

from megarl.tracking.console import ConsoleTracker, step_line

METRICS = {
    "reward/mean": 0.5,
    "policy/mismatch_kl": 3.2e-9,
    "reward/verifier_error": 2.0,
    "time/step_s": 2.0,
    "time/generate_s": 1.0,
    "time/train_s": 0.6,
    "time/sync_s": 0.2,
}


def test_a_step_is_one_line_with_where_its_time_went() -> None:
    line = step_line(METRICS, step=7, max_steps=100)
    assert line.startswith("step   7/100  reward 0.500  mismatch_kl 3.2e-09")
    assert line.endswith("without reward 2  2.00 s: generate 50%, train 30%, sync 10%")


def shown(*, terminal: bool) -> str:
    out = io.StringIO()
    tracker = ConsoleTracker(100, console=Console(file=out, force_terminal=terminal, width=60))
    tracker.log({"eval/accuracy": 0.5, "eval/prompts": 8.0}, step=0)
    tracker.log(METRICS, step=1)
    tracker.close("FINISHED")
    return out.getvalue()


def test_without_a_terminal_there_are_plain_whole_lines_and_no_bar() -> None:
    assert shown(terminal=False).rstrip().splitlines() == [
        "step 0  held-out accuracy 50.0%  (8 problems)",
        step_line(METRICS, step=1, max_steps=100),
    ]


def test_in_a_terminal_there_is_a_bar_too() -> None:
    assert "━" in shown(terminal=True)
    assert "held-out accuracy 50.0%" in shown(terminal=True)
