"""Checkpoints appear whole, are kept in number, and are refused loudly when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.recovery.checkpoint import CheckpointDamaged, Checkpoints
from megarl.types import LoopState


class Trainer:
    """Saves one number; may break in the middle of saving or loading."""

    def __init__(self, weight: int = 0, breaks: bool = False) -> None:
        self.weight, self.breaks = weight, breaks

    async def save(self, folder: Path) -> None:
        assert folder.is_absolute()
        (folder / "weight").write_text(str(self.weight))
        if self.breaks:
            raise OSError("disk full")

    async def load(self, folder: Path) -> None:
        if self.breaks:
            raise OSError("shape differs")
        self.weight = int((folder / "weight").read_text())


def make(folder: Path, *, every: int = 10, keep: int = 2, last_step: int = 45) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", every=every, keep=keep, last_step=last_step)


async def run_to(checkpoints: Checkpoints, last: int) -> None:
    for step in range(1, last + 1):
        await checkpoints.maybe_save(Trainer(step), LoopState(step, step * 8, "run-7"))


async def test_without_a_checkpoint_the_run_starts_fresh(tmp_path):
    assert await make(tmp_path).restore(Trainer()) == LoopState()


async def test_saves_on_schedule_and_at_the_last_step_and_keeps_the_newest(tmp_path):
    await run_to(make(tmp_path), 45)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000040", "step-000045"]


async def test_every_zero_saves_at_the_last_step_only(tmp_path):
    checkpoints = make(tmp_path, every=0)
    await run_to(checkpoints, 45)
    assert [path.name for path in checkpoints.committed()] == ["step-000045"]


async def test_restore_gives_the_newest_weights_and_the_loops_position(tmp_path):
    await run_to(make(tmp_path), 25)
    trainer = Trainer()
    assert await make(tmp_path).restore(trainer) == LoopState(20, 160, "run-7")
    assert trainer.weight == 20


async def test_the_newest_is_found_by_number_not_by_name(tmp_path):
    checkpoints = make(tmp_path, last_step=2_000_000)
    for step in (999_990, 1_000_000):
        await checkpoints.maybe_save(Trainer(step), LoopState(step))
    assert (await checkpoints.restore(Trainer())).step == 1_000_000


async def test_a_checkpoint_that_broke_half_way_is_not_seen_and_is_cleaned_up(tmp_path):
    checkpoints = make(tmp_path)
    await run_to(checkpoints, 10)
    with pytest.raises(OSError, match="disk full"):
        await checkpoints.maybe_save(Trainer(20, breaks=True), LoopState(20))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert (await checkpoints.restore(Trainer())).step == 10
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000010"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1, "colour": 2}'])
async def test_a_damaged_newest_checkpoint_is_refused_with_file_and_way_out(tmp_path, text):
    checkpoints = make(tmp_path)
    await run_to(checkpoints, 20)
    newest = tmp_path / "checkpoints" / "step-000020"
    (newest / "loop_state.json").write_text(text)
    with pytest.raises(CheckpointDamaged, match=rf"{newest}/loop_state.json.*remove {newest}"):
        await checkpoints.restore(Trainer())


async def test_falling_back_is_removing_the_damaged_folder(tmp_path):
    checkpoints = make(tmp_path)
    await run_to(checkpoints, 20)
    newest = checkpoints.committed()[-1]
    newest.rename(tmp_path / "away")
    assert (await checkpoints.restore(Trainer())).step == 10


async def test_weights_that_do_not_load_name_the_checkpoint(tmp_path):
    checkpoints = make(tmp_path)
    await run_to(checkpoints, 10)
    with pytest.raises(OSError, match="shape differs") as raised:
        await checkpoints.restore(Trainer(breaks=True))
    assert "step-000010" in raised.value.__notes__[0]
