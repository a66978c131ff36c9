"""Ctrl-C and SIGTERM: everything is asked to stop once, and the process is gone soon after, whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 8.0
"""Time for clean-up; with it everything is gone within 10 seconds."""


def run_until_signal(coroutine: Coroutine[Any, Any, T], *, grace_s: float = GRACE_S) -> T:
    """Run ``coroutine`` in an event loop of its own. A first SIGINT or SIGTERM cancels it, a second ends the process.

    After the first signal the process also ends when ``grace_s`` seconds are over. Ending means at once, with status
    128 + signal and without clean-up; the processes Ray started die with this one. Call it from the main thread.

    Raises:
        KeyboardInterrupt: a signal came and the coroutine ended by it.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(coroutine)
        stopper = _Stopper(loop, task, grace_s)
        before = {number: signal.signal(number, stopper) for number in _SIGNALS}
        try:
            return runner.run(_result_of(task))
        except (Exception, asyncio.CancelledError) as error:
            if stopper.received is None:
                raise
            raise KeyboardInterrupt(stopper.received.name) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def _result_of(task: asyncio.Task[T]) -> T:
    return await task


class _Stopper:
    """A signal handler. It is no asyncio handler, so that it runs also while something blocks the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], grace_s: float) -> None:
        self._loop, self._task, self._grace_s = loop, task, grace_s
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            _leave(number, "stopped a second time")
        self.received = signal.Signals(number)
        text = f"stopping took longer than {self._grace_s:g} s"
        timer = threading.Timer(self._grace_s, _leave, (number, text))
        timer.daemon = True
        timer.start()
        self._loop.call_soon_threadsafe(self._task.cancel)


def _leave(number: int, why: str) -> None:
    os.write(2, f"megarl: {why}; leaving without clean-up\n".encode())
    os._exit(128 + number)
