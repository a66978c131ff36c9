"""Checkpoints of a whole run: each appears by one rename, or not at all.

<folder>/step-000020/loop_state.json     the loop's position and the tracker's run id
<folder>/step-000020/trainer/...         what the trainer saved
<folder>/.step-000040.tmp-...            unfinished, or on its way out; removed by the next ``restore``
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from megarl.interfaces import PolicyTrainer
from megarl.types import LoopState

_log = logging.getLogger(__name__)

_STATE_FILE = "loop_state.json"
_TRAINER_FOLDER = "trainer"


class CheckpointDamaged(ValueError):
    """The newest checkpoint cannot be read. Falling back to an older one is the user's decision."""


class Checkpoints:
    """The ``Recovery`` of a run: saves every ``every`` steps and at ``last_step``, keeps the ``keep`` newest.

    One process at a time may use ``folder``. It has to be on a file system that all trainer ranks share.
    """

    def __init__(self, folder: Path, *, every: int, keep: int, last_step: int | None) -> None:
        """``every`` = 0 saves at the last step only, ``last_step`` None not there either."""
        self._folder = folder.absolute()  # the ranks have other working directories
        self._every, self._keep, self._last_step = every, keep, last_step

    async def restore(self, trainer: PolicyTrainer) -> LoopState:
        """Load the newest committed checkpoint into ``trainer``, or return a fresh state.

        Metrics recorded after that step belong to steps that will run again; the tracker drops them.

        Raises:
            CheckpointDamaged: its loop state cannot be read.
        """
        self._remove_unfinished()
        committed = self.committed()
        if not committed:
            return LoopState()
        newest = committed[-1]
        state = _read_state(newest)
        try:
            await trainer.load(newest / _TRAINER_FOLDER)
        except Exception as error:
            error.add_note(f"This happened while loading the checkpoint {newest}. {_way_out(newest)}")
            raise
        _log.info("continuing after step %d from %s", state.step, newest)
        return state

    def newest_state(self) -> LoopState:
        """The loop state of the newest committed checkpoint, or a fresh one; nothing is loaded."""
        committed = self.committed()
        return _read_state(committed[-1]) if committed else LoopState()

    async def maybe_save(self, trainer: PolicyTrainer, state: LoopState) -> None:
        """Commit a checkpoint when the schedule says so, then remove the oldest ones."""
        if self._due(state.step):
            await self._save(trainer, state)
            for old in self.committed()[: -self._keep]:
                self._discard(old)

    def committed(self) -> list[Path]:
        """The folders of all complete checkpoints, oldest first."""
        return sorted(self._folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))

    def _due(self, step: int) -> bool:
        return step == self._last_step or (self._every > 0 and step % self._every == 0)

    async def _save(self, trainer: PolicyTrainer, state: LoopState) -> None:
        name = f"step-{state.step:06d}"
        self._folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=self._folder))
        scratch.chmod(0o755)
        (scratch / _TRAINER_FOLDER).mkdir()
        await trainer.save(scratch / _TRAINER_FOLDER)
        (scratch / _STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n")
        _flush(scratch)
        scratch.rename(self._folder / name)
        _flush_one(self._folder)

    def _discard(self, checkpoint: Path) -> None:
        """Rename first: a half-removed folder must not look like a checkpoint."""
        doomed = Path(tempfile.mkdtemp(prefix=f".{checkpoint.name}.tmp-", dir=self._folder))
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)

    def _remove_unfinished(self) -> None:
        for path in self._folder.glob(".step-*.tmp-*"):
            shutil.rmtree(path)


def _read_state(checkpoint: Path) -> LoopState:
    file = checkpoint / _STATE_FILE
    try:
        return LoopState(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointDamaged(
            f"checkpoint file {file} must hold the loop's state as JSON and cannot be read "
            f"({type(error).__name__}: {error}). {_way_out(checkpoint)}"
        ) from None


def _way_out(checkpoint: Path) -> str:
    return f"To go on from the checkpoint before it, or from the start if there is none, remove {checkpoint}."


def _flush(folder: Path) -> None:
    """Wait until everything below ``folder`` is on the disk, also what other processes wrote."""
    for root, _, files in os.walk(folder):
        for name in files:
            _flush_one(Path(root, name))
        _flush_one(Path(root))


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
