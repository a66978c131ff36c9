"""The buffer between rollouts and training, and the one owner of staleness."""

from __future__ import annotations

import asyncio
from collections import deque

from megarl.types import TrajectoryGroup


class GroupBuffer:
    """Finished groups in strict prompt order, in ``(max_staleness + 1) * prompts_per_step`` slots.

    A slot is taken when a prompt starts and freed only after the weights that its group trained are published. So at
    most ``max_staleness + 1`` steps' worth of prompts are ever between start and publication, and since groups leave in
    the order in which they started, none is trained more than ``max_staleness`` versions late.
    """

    def __init__(self, prompts_per_step: int, max_staleness: int) -> None:
        self._free = (max_staleness + 1) * prompts_per_step
        self._groups: deque[TrajectoryGroup] = deque()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None

    async def acquire(self) -> int:
        """Wait until slots are free and take them all; how many."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free > 0)
            taken, self._free = self._free, 0
            return taken

    async def put(self, groups: list[TrajectoryGroup]) -> None:
        """Add finished groups, which must continue the prompt order."""
        async with self._changed:
            self._groups.extend(groups)
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """No more groups will come; ``take`` raises ``error``."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def take(self, count: int) -> list[TrajectoryGroup]:
        """The next ``count`` groups in prompt order; raises what made the producer fail."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._groups) >= count or self._failure is not None)
            if self._failure is not None:
                raise self._failure
            return [self._groups.popleft() for _ in range(count)]

    async def release(self, count: int) -> None:
        """Free the slots of ``count`` groups, so that newer prompts may start."""
        async with self._changed:
            self._free += count
            self._changed.notify_all()
