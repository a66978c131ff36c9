"""Logging of the driver and of the workers: one line per record, with time and process; and the end of a log file."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

_TAIL_BYTES = 64 * 1024


def configure(process: str, *, level: int = logging.INFO) -> None:
    """Send log records to standard error as ``12:30:01 <process> INFO megarl.loop: text``.

    ``level`` is megarl's own; other libraries are heard from WARNING on.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format=f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.getLogger("megarl").setLevel(level)


def last_lines(path: Path, count: int) -> tuple[str, ...]:
    """The last ``count`` lines of a text file that may still grow; empty where there is no such file.

    Only the last 64 KiB are read, and bytes that are not UTF-8 come back as replacement characters.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            tail = file.read()
    except FileNotFoundError:
        return ()
    return tuple(tail.decode(errors="replace").splitlines()[-count:])
