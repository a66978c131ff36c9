"""Keeps the buffer filled: as slots free up, the next prompts are sampled and scored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from megarl.data.prompts import Task
from megarl.interfaces import Env
from megarl.rewards import Rubric
from megarl.rollout.buffer import GroupBuffer
from megarl.types import Prompt, TrajectoryGroup

_SCORING_TIMEOUT_S = 300.0


class StreamRollouter:
    """A ``Rollouter`` over one task and one environment."""

    def __init__(
        self,
        task: Task,
        env: Env,
        rubric: Rubric,
        buffer: GroupBuffer,
        *,
        group_size: int,
        prompts_per_step: int,
        num_prompts: int,
    ) -> None:
        """``num_prompts`` is where the stream ends: the last prompt that any step will train on."""
        self._task, self._env, self._rubric, self._buffer = task, env, rubric, buffer
        self._group_size, self._prompts_per_step, self._num_prompts = group_size, prompts_per_step, num_prompts

    @asynccontextmanager
    async def running(self, prompts_done: int) -> AsyncIterator[None]:
        """While inside, groups are produced, starting with prompt number ``prompts_done``."""
        producer = asyncio.create_task(self._produce(prompts_done), name="rollouter")
        try:
            yield
        finally:
            producer.cancel()
            with suppress(asyncio.CancelledError):
                await producer

    async def _produce(self, number: int) -> None:
        """All free slots become one call of the engine, so that the same position gives the same samples."""
        try:
            while number < self._num_prompts:
                end = min(number + await self._buffer.acquire(), self._num_prompts)
                prompts = [self._task.train(n) for n in range(number, end)]
                await self._buffer.put(await self._groups(prompts))
                number = end
        except Exception as error:  # noqa: BLE001 - the consumer waits in take(): it must hear of it
            await self._buffer.fail(error)

    async def _groups(self, prompts: Sequence[Prompt]) -> list[TrajectoryGroup]:
        step = prompts[0].number // self._prompts_per_step
        groups = await self._env.run(prompts, step=step, group_size=self._group_size)
        try:
            await asyncio.wait_for(asyncio.to_thread(self._score, groups), _SCORING_TIMEOUT_S)
        except TimeoutError:
            raise TimeoutError(f"rewards of {len(groups)} groups took longer than {_SCORING_TIMEOUT_S:g} s") from None
        return groups

    def _score(self, groups: Sequence[TrajectoryGroup]) -> None:
        for group in groups:
            for trajectory in group.trajectories:
                self._rubric.score(trajectory)
