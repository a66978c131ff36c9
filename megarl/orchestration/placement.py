"""Who has the accelerators when."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol


class Sleeper(Protocol):
    """An engine that can leave the accelerator's memory and come back to it."""

    async def sleep(self) -> None:
        """Give the memory away; returns when it is free."""
        ...

    async def wake(self) -> None:
        """Take the memory back; returns when requests may start."""
        ...


class Colocated:
    """Trainer and engines share the accelerators: the engines sleep while the trainer works.

    On a machine without accelerators nobody has to make room in host memory, so ``sleepers`` is empty there.
    """

    def __init__(self, sleepers: Sequence[Sleeper] = ()) -> None:
        self._sleepers = tuple(sleepers)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Engines sleep inside. After an error they are left asleep: the run is over."""
        for sleeper in self._sleepers:
            await sleeper.sleep()
        yield
        for sleeper in self._sleepers:
            await sleeper.wake()


class Disaggregated:
    """Trainer and engines have accelerators of their own, so nobody waits for anybody."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Changes nothing."""
        yield
