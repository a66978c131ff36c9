from __future__ import annotations

from pathlib import Path

import pytest

from megarl.tracking.curves import overlay, plot_run
from tests.tracking.records import write_run

STEP = '{{"step": {0}, "reward/mean": 0.{0}, "policy/mismatch_kl": {1}, "time/step_s": {0}.5, "time/train_s": 1.0}}'


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ['{"step": 0, "eval/accuracy": 0.5}'],
        [STEP.format(1, "0.0")],
        [STEP.format(n, f"1e-{n}") for n in range(1, 10)],
        ['{"step": 1, "reward/mean": null, "policy/grad_norm": null}', '{"step": 2, "policy/grad_norm": 1.0}'],
    ],
    ids=["empty", "only evaluated", "one step", "steps", "not finite"],
)
def test_whatever_was_recorded_is_drawn(tmp_path: Path, lines: list[str]) -> None:
    run = write_run(tmp_path / "odd $\\frac{ name", lines)
    plot_run(run / "metrics.jsonl", run / "curves.png")
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_overlay_has_every_run_in_its_own_colour() -> None:
    (axes,) = overlay("reward/mean", {"a": [(1, 0.1), (2, 0.2)], "b": [(1, 0.3), (2, 0.1)], "c": []}).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.1, 0.2], [0.3, 0.1]]
    assert len({line.get_color() for line in axes.lines}) == 2
