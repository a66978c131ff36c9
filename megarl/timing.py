"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Adds up named phases of one step; what no phase covers is the loop's own overhead."""

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside under ``time/<name>_s``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """Seconds of each phase, ``time/step_s`` and ``time/overhead_s``; then start the next step."""
        now = time.perf_counter()
        step_s = now - self._start
        times = {f"time/{name}_s": seconds for name, seconds in self._phases.items()}
        times["time/step_s"] = step_s
        times["time/overhead_s"] = step_s - sum(self._phases.values())
        self._phases, self._start = {}, now
        return times
