"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A scratch folder beside ``folder`` that takes its name at the end; on any error it is removed.

    Raises:
        ValueError: ``folder`` exists already.
    """
    if folder.exists():
        raise ValueError(f"{folder} must not exist yet: nothing is overwritten; use {free_name(folder)}, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def free_name(folder: Path) -> Path:
    """``folder`` with the lowest number behind it, from 2 on, that makes it a name nobody has."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(name for name in names if not name.exists())
