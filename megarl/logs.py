"""Logging of the driver and of the workers: one line per record, with time and process; and the end of a log file."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """While inside, megarl's own log records of this process, from INFO on, also go to the end of the file ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("megarl")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()


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
