from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from megarl.rewards import Rubric
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.rollouter import StreamRollouter
from megarl.types import Prompt, Trajectory, TrajectoryGroup, Turn


class Task:
    def train(self, number: int) -> Prompt:
        return Prompt(number, (), "")


class Env:
    """Notes its calls; fails on request."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[list[int], int]] = []
        self._error = error

    async def run(self, prompts: Sequence[Prompt], *, step: int, group_size: int) -> list[TrajectoryGroup]:
        self.calls.append(([prompt.number for prompt in prompts], step))
        if self._error:
            raise self._error
        turn = Turn((1,), (2,), (-0.1,), step, "stop")
        return [
            TrajectoryGroup(p, tuple(Trajectory(p, [turn], "", "finished") for _ in range(group_size))) for p in prompts
        ]


def _rollouter(env: Env, buffer: GroupBuffer, reward=lambda t: 1.0) -> StreamRollouter:
    rubric = Rubric([("task", 1.0, reward)])
    return StreamRollouter(Task(), env, rubric, buffer, group_size=2, prompts_per_step=3, num_prompts=10**6)  # type: ignore[arg-type]


async def test_groups_come_scored_and_start_at_the_given_prompt() -> None:
    env, buffer = Env(), GroupBuffer(3, 0)
    async with _rollouter(env, buffer).running(prompts_done=6):
        groups = await asyncio.wait_for(buffer.take(3), 5)
    assert [group.prompt.number for group in groups] == [6, 7, 8]
    assert [t.reward for group in groups for t in group.trajectories] == [1.0] * 6


async def test_free_slots_become_one_call_under_the_version_they_start_under() -> None:
    env, buffer = Env(), GroupBuffer(3, max_staleness=0)
    async with _rollouter(env, buffer).running(prompts_done=0):
        for _ in range(3):
            await asyncio.wait_for(buffer.take(3), 5)
            await buffer.release(3)
    assert env.calls[:3] == [([0, 1, 2], 0), ([3, 4, 5], 1), ([6, 7, 8], 2)]


async def test_a_restart_asks_for_the_same_prompts_under_the_same_step() -> None:
    whole, resumed = Env(), Env()
    for env, done in ((whole, 0), (resumed, 3)):
        buffer = GroupBuffer(3, 0)
        async with _rollouter(env, buffer).running(prompts_done=done):
            await asyncio.wait_for(buffer.take(3), 5)
            await buffer.release(3)
            await asyncio.wait_for(buffer.take(3), 5)
    assert whole.calls[1] == resumed.calls[0]


@pytest.mark.parametrize("error", [RuntimeError("engine 0 died"), TimeoutError("600 s"), ValueError("over-long")])
async def test_a_failing_producer_is_an_error_in_take_never_a_hang(error: Exception) -> None:
    buffer = GroupBuffer(3, 0)
    async with _rollouter(Env(error), buffer).running(0):
        with pytest.raises(type(error), match=str(error)):
            await asyncio.wait_for(buffer.take(3), 5)


async def test_leaving_stops_the_producer() -> None:
    buffer = GroupBuffer(3, 0)
    before = asyncio.all_tasks()
    async with _rollouter(Env(), buffer).running(0):
        await asyncio.wait_for(buffer.take(3), 5)
    assert asyncio.all_tasks() == before


async def test_slow_rewards_do_not_block_the_event_loop() -> None:
    import time

    buffer, ticks = GroupBuffer(3, 0), 0
    async with _rollouter(Env(), buffer, reward=lambda t: time.sleep(0.02) or 1.0).running(0):
        taking = asyncio.create_task(buffer.take(3))
        while not taking.done():
            await asyncio.sleep(0.005)
            ticks += 1
    assert ticks >= 5
