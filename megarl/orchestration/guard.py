"""Ends what a driver started when the driver is gone, however it went. Run as a script by ``LocalProcesses``.

Watches the descendants of the driver, whose pid is its argument, until the other end of the pipe closes, which the
kernel does for a killed driver too; then it kills those it saw that are still the same processes, and what they
started since. Ray's servers and workers end by themselves within seconds, but its agents try for a minute to report to
the dead server. A line on the pipe means that all is well and nothing is left to end. Only the standard library is
used, to stay near 10 MB.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_EVERY_S = 0.25
"""Between looks; a look takes about a millisecond. A process that came since the last one before the driver died, and
whose parent died with it, is missed."""

Family = dict[int, str]
"""pid: start time, in clock ticks since boot; together they name a process for good."""


def main() -> None:
    """Watch until the end of standard input, then kill."""
    driver = int(sys.argv[1])
    known: Family = {}
    while not select.select([sys.stdin], [], [], _EVERY_S)[0]:
        known |= _descendants({driver})
    if sys.stdin.read():
        return
    alive = {pid for pid, started in known.items() if _stat(pid, 19) == started}
    for pid in alive | set(_descendants(alive)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pids: set[int]) -> Family:
    """All processes that descend from ``pids``, without this one."""
    children = defaultdict(set)
    for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
        children[_stat(pid, 1)].add(pid)
    found: set[int] = set()
    fresh = pids
    while fresh:
        fresh = set().union(*(children[str(pid)] for pid in fresh)) - found - {os.getpid()}
        found |= fresh
    return {pid: _stat(pid, 19) for pid in found}


def _stat(pid: int, number: int) -> str:
    """A field of /proc/<pid>/stat, counted after the name, which may hold blanks and brackets; empty when gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[number]
    except OSError:
        return ""


if __name__ == "__main__":
    main()
