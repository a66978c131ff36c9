"""The processes of a Ray that this driver started, from its servers to the children of its workers, and their end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from megarl.orchestration import guard

_SHARED_MEMORY = "/dev/shm/"
_GONE_AFTER_S = 3.0


class LocalProcesses:
    """Knows them from ``starting`` to ``end``. A guard process kills all of them when this process dies before."""

    def __init__(self) -> None:
        self._servers: set[psutil.Process] = set()
        self._known: set[psutil.Process] = set()  # compared by pid and start time
        self._guard: subprocess.Popen[str] | None = None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Children of this process that appear inside are Ray's servers; none do when Ray runs elsewhere."""
        others = set(psutil.Process().children())
        yield
        self._servers = set(psutil.Process().children()) - others
        if self._servers:
            command = [sys.executable, "-E", "-S", guard.__file__]
            # A session of its own keeps the guard away from the terminal's Ctrl-C.
            self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
            self.refresh()

    def refresh(self) -> None:
        """Get to know the servers' descendants of this moment."""
        found = set(self._servers)
        for server in self._servers:
            found |= _descendants(server)
        if self._guard is not None and self._guard.stdin is not None:
            for process in found - self._known:
                self._guard.stdin.write(f"{process.pid} {guard.start_time(process.pid)}\n")
            self._guard.stdin.flush()
        self._known |= found

    def kill_all_but(self, name: str) -> None:
        """End everything at once but the server called ``name``; then remove the shared memory that was left.

        Shared memory are files in /dev/shm that one of the processes mapped and that no process maps any more.
        """
        self.refresh()
        segments = _mapped(self._known)
        doomed = [process for process in self._known if _is_alive(process, but=name)]
        for process in doomed:
            with suppress(psutil.NoSuchProcess):  # some end by themselves when one before them is gone
                process.kill()
        _wait_for_end(doomed)
        if segments:
            for path in segments - _mapped(psutil.process_iter()):
                path.unlink(missing_ok=True)

    def end(self) -> None:
        """End what is left, and the guard."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()
        self._guard, self._servers, self._known = None, set(), set()


def _descendants(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _is_alive(process: psutil.Process, but: str = "") -> bool:
    """Whether ``process`` runs and is not called ``but``."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE and process.name() != but)
    except psutil.NoSuchProcess:
        return False


def _wait_for_end(processes: Iterable[psutil.Process]) -> None:
    deadline = time.monotonic() + _GONE_AFTER_S
    while any(_is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def _mapped(processes: Iterable[psutil.Process]) -> set[Path]:
    return {path for process in processes for path in _mapped_by(process.pid)}


def _mapped_by(pid: int) -> set[Path]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:  # it ended, or is another user's
        return set()
    paths = {line[line.index(_SHARED_MEMORY) :] for line in maps if _SHARED_MEMORY in line}
    return {Path(path) for path in paths if not path.endswith(" (deleted)")}
