"""Work done in order by one thread, so that a slow tracker costs the caller nothing."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from megarl.tracking.boundary import Boundary

Action = Callable[[], None]


class Background:
    """A bounded queue and its thread. What does not fit is dropped and counted; the caller never waits."""

    def __init__(self, boundary: Boundary, *, capacity: int) -> None:
        self._boundary = boundary
        self._queue: queue.Queue[Action | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name="megarl-tracking", daemon=True)
        self._thread.start()

    def submit(self, action: Action) -> None:
        """Have ``action`` done after those before it."""
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self._boundary.problem(f"{self._queue.maxsize} records wait already; this one is dropped")

    def close(self, *, deadline_s: float) -> None:
        """Wait until everything is done, at most ``deadline_s``; what is not done then is dropped and counted."""
        end = time.monotonic() + deadline_s
        with contextlib.suppress(queue.Full):  # not one action done in all that time: join below times out at once
            self._queue.put(None, timeout=deadline_s)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            waiting = self._queue.qsize()
            self._boundary.problem(f"still busy after {deadline_s:g} s; about {waiting} more records are dropped")

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            self._boundary.attempt(action)
