"""Ends what a driver started when the driver is gone, however it went. Run as a script by ``LocalProcesses``.

Reads lines ``pid start-time`` until the other end of the pipe closes, which the kernel does for a killed driver too,
and then kills those processes that are still the same, and their descendants. Ray's servers and workers end by
themselves within seconds, but its agents try for a minute to report to the dead server. Only the standard library is
used, to stay near 10 MB.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path


def start_time(pid: int) -> str:
    """Clock ticks since boot at which the process started; empty when there is none. With the pid it is unique."""
    return _stat(pid, 19)


def _stat(pid: int, number: int) -> str:
    """A field of /proc/<pid>/stat, counted after the name, which may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[number]
    except OSError:
        return ""


def _with_descendants(pids: set[int]) -> set[int]:
    children = defaultdict(set)
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
        children[_stat(pid, 1)].add(pid)
    found, fresh = set(pids), set(pids)
    while fresh:
        fresh = set().union(*(children[str(pid)] for pid in fresh)) - found
        found |= fresh
    return found


def main() -> None:
    """Wait for the end of standard input, then kill."""
    given = [line.split() for line in sys.stdin]
    for pid in _with_descendants({int(pid) for pid, started in given if start_time(int(pid)) == started}):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
