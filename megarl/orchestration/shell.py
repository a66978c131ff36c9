"""What surrounds a worker's class inside its process: log file, environment, errors. Knows nothing of Ray."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import logs


@dataclass(frozen=True, slots=True)
class Raised:
    """An error of the worker's class, as text: error objects do not always survive the way between processes."""

    text: str
    """``Type: message``, one line. The traceback is in the worker's log."""


class Shell:
    """Lives in a process of its own and runs the methods of one object there.

    No method raises for an error of that object; it is returned as ``Raised``, with the traceback in the log.
    """

    def __init__(self, process: str, log: Path) -> None:
        _send_output_to(log)
        logs.configure(process)
        self._target: Any = None

    def build(self, target: str, args: tuple[Any, ...], environment: Mapping[str, str]) -> Raised | None:
        """Set ``environment``, import ``module:Class`` and construct it."""
        os.environ.update(environment)
        try:
            module, _, name = target.partition(":")
            self._target = getattr(importlib.import_module(module), name)(*args)
        except Exception as error:  # noqa: BLE001 - the boundary of a supervised process
            return _reported(error)
        return None

    def run(self, method: str, args: tuple[Any, ...]) -> Any:
        """The result of ``method(*args)``, or ``Raised``."""
        try:
            return getattr(self._target, method)(*args)
        except Exception as error:  # noqa: BLE001 - the boundary of a supervised process
            return _reported(error)


def _send_output_to(log: Path) -> None:
    """All output of this process, also that of C++ code and of its children, goes to the end of ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115 - open for life
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115


def _reported(error: Exception) -> Raised:
    traceback.print_exception(error)
    sys.stderr.flush()
    return Raised(" ".join(f"{type(error).__name__}: {error}".split()))
