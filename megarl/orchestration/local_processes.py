"""The processes of a Ray that this driver started, from its servers to the children of its workers, and their end."""

from __future__ import annotations

import os
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
        command = [sys.executable, "-E", "-S", guard.__file__, str(os.getpid())]
        # A session of its own keeps the guard away from the terminal's Ctrl-C.
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        others = set(psutil.Process().children())
        try:
            yield
        except BaseException:
            self._know_servers(others)
            self.end()
            raise
        self._know_servers(others)

    def _know_servers(self, others: set[psutil.Process]) -> None:
        self._servers = set(psutil.Process().children()) - others
        self.refresh()

    def refresh(self) -> None:
        """Get to know the servers' descendants of this moment."""
        for server in self._servers:
            self._known |= {server} | _descendants(server)

    def kill_all_but(self, name: str) -> None:
        """End everything at once but the server called ``name``; then remove the shared memory that was left.

        Shared memory are files in /dev/shm that one of the processes mapped and that no process maps any more.
        """
        self.refresh()
        segments = _mapped(self._known)
        _kill(process for process in self._known if _is_alive(process, but=name))
        if segments:
            for path in segments - _mapped(psutil.process_iter()):
                path.unlink(missing_ok=True)

    def end(self) -> None:
        """End what is left, and the guard."""
        _kill(process for process in self._known if _is_alive(process))
        if self._guard is not None:
            self._guard.communicate("all is well\n")
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


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Kill all of them and wait until they are gone."""
    doomed = list(processes)
    for process in doomed:
        with suppress(psutil.NoSuchProcess):  # some end by themselves when one before them is gone
            process.kill()
    deadline = time.monotonic() + _GONE_AFTER_S
    while any(_is_alive(process) for process in doomed) and time.monotonic() < deadline:
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
