"""The last resort when a run stops: what its workers left on this machine, processes and shared memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_log = logging.getLogger(__name__)

_SHARED_MEMORY = "/dev/shm/"
_WAIT_S = 3.0


class Leftovers:
    """Remembers worker processes, their children and the shared memory they map; removes what outlives them."""

    def __init__(self) -> None:
        self._processes: set[psutil.Process] = set()  # compared by pid and start time

    def watch(self, pids: Iterable[int]) -> None:
        """Remember these processes of this machine and their children. May be called again."""
        for pid in pids:
            try:
                worker = psutil.Process(pid)
                self._processes |= {worker, *worker.children(recursive=True)}
            except psutil.NoSuchProcess:
                continue

    def shared_memory(self) -> set[Path]:
        """Files in /dev/shm that a watched process maps now."""
        return {path for process in self._processes for path in _mapped(process)}

    def remove(self, shared_memory: set[Path]) -> None:
        """End watched processes that do not end by themselves, then unlink ``shared_memory`` that nobody maps."""
        _, alive = psutil.wait_procs(self._processes, timeout=_WAIT_S)
        for process in alive:
            _log.warning("process %d (%s) did not end with its group; killed", process.pid, _name(process))
            process.kill()
        psutil.wait_procs(alive, timeout=_WAIT_S)
        for path in shared_memory - {path for process in psutil.process_iter() for path in _mapped(process)}:
            path.unlink(missing_ok=True)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "gone"


def _mapped(process: psutil.Process) -> set[Path]:
    try:
        maps = process.memory_maps(grouped=True)
    except (psutil.Error, OSError):  # it ended, or is another user's
        return set()
    return {Path(item.path) for item in maps if item.path.startswith(_SHARED_MEMORY)}
