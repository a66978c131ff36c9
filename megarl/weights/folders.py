"""A folder that appears whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A scratch folder beside ``folder`` that takes its name at the end; on any error it is removed.

    Raises:
        ValueError: ``folder`` exists already.
    """
    if folder.exists():
        raise ValueError(f"{folder} must not exist yet: nothing is overwritten; choose another folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
