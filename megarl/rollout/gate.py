"""Where sampling stands still while weights change: a gate that an engine passes before every step.

One thread samples and passes the gate; another pauses and resumes. With tensor parallelism every rank has a gate, and
all of them must stop before the same step, though each is told at another moment: so the ranks agree at the gate on
how often any of them was paused so far, and each waits until it was itself resumed as often.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Agree = Callable[[int, int], tuple[int, int]]
"""Elementwise largest over all ranks of an engine; every rank calls it at the same point."""


def alone(pauses: int, aborts: int) -> tuple[int, int]:
    """``Agree`` of an engine with one rank."""
    return pauses, aborts


class Gate:
    """Open at first."""

    def __init__(self, agree: Agree, timeout_s: float) -> None:
        self._agree, self._timeout_s = agree, timeout_s
        self._changed = threading.Condition()
        self._pauses = self._resumes = 0
        self._aborts = self._aborts_seen = 0

    @property
    def is_open(self) -> bool:
        """Whether this rank was resumed as often as it was paused."""
        return self._resumes == self._pauses

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Before the first step of new work. Inside, nobody can pause.

        Raises:
            TimeoutError: the gate stayed closed.
        """
        with self._changed:
            pauses, self._aborts_seen = self._agree(self._pauses, self._aborts)
            self._wait_for(pauses)
            yield

    @contextmanager
    def passing(self) -> Iterator[bool]:
        """Before every step. Inside, nobody can pause; False when the work is to be given up.

        Raises:
            TimeoutError: the gate stayed closed.
        """
        with self._changed:
            pauses, aborts = self._agree(self._pauses, self._aborts)
            if aborts > self._aborts_seen:
                self._aborts_seen = aborts
                yield False
            else:
                self._wait_for(pauses)
                yield True

    def _wait_for(self, pauses: int) -> None:
        if not self._changed.wait_for(lambda: self._resumes >= pauses, self._timeout_s):
            raise TimeoutError(f"the engine was paused and not resumed within {self._timeout_s:g} s")

    def close(self, *, abort: bool) -> None:
        """Pause; returns when no step is under way. With ``abort`` the work under way is given up."""
        with self._changed:
            self._pauses += 1
            self._aborts += abort

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no step is under way."""
        with self._changed:
            yield

    def open(self) -> None:
        """Resume."""
        with self._changed:
            self._resumes = self._pauses
            self._changed.notify_all()
