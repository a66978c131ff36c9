from __future__ import annotations

import asyncio
import random

import pytest

from megarl.rollout.buffer import GroupBuffer
from megarl.types import Prompt, TrajectoryGroup


def _groups(first: int, count: int) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(Prompt(number, (), ""), ()) for number in range(first, first + count)]


def _numbers(groups: list[TrajectoryGroup]) -> list[int]:
    return [group.prompt.number for group in groups]


async def _still_waits(awaitable) -> bool:
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0.01)
    waits = not task.done()
    task.cancel()
    return waits


async def test_groups_leave_in_the_order_they_came() -> None:
    buffer = GroupBuffer(2, max_staleness=1)
    await buffer.put(_groups(0, 3))
    await buffer.put(_groups(3, 1))
    assert _numbers(await buffer.take(2)) + _numbers(await buffer.take(2)) == [0, 1, 2, 3]


async def test_take_waits_for_a_whole_step() -> None:
    buffer = GroupBuffer(2, max_staleness=0)
    await buffer.put(_groups(0, 1))
    assert await _still_waits(buffer.take(2))


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_all_slots_are_taken_at_once_and_only_release_frees_them(staleness: int) -> None:
    buffer = GroupBuffer(4, staleness)
    assert await buffer.acquire() == 4 * (staleness + 1)
    await buffer.put(_groups(0, 4))
    await buffer.take(4)
    assert await _still_waits(buffer.acquire()), "taking groups frees nothing"
    await buffer.release(4)
    assert await buffer.acquire() == 4


async def test_a_failed_producer_raises_in_take_even_when_it_waits_already() -> None:
    buffer = GroupBuffer(2, max_staleness=0)
    waiting = asyncio.create_task(buffer.take(2))
    await asyncio.sleep(0)
    await buffer.fail(RuntimeError("engine 0 died"))
    with pytest.raises(RuntimeError, match="engine 0 died"):
        await asyncio.wait_for(waiting, 1)
    with pytest.raises(RuntimeError, match="engine 0 died"):
        await asyncio.wait_for(buffer.take(1), 1)


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
async def test_staleness_never_exceeds_its_bound_and_reaches_it(bound: int, seed: int) -> None:
    """Sampling and training take random times; the version is read when sampling starts, as an engine would."""
    rng, buffer, version, seen = random.Random(seed), GroupBuffer(3, bound), 0, []
    started: dict[int, int] = {}

    async def produce() -> None:
        number = 0
        while True:
            count = await buffer.acquire()
            started.update(dict.fromkeys(range(number, number + count), version))
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            await buffer.put(_groups(number, count))
            number += count

    producer = asyncio.create_task(produce())
    for step in range(30):
        numbers = _numbers(await asyncio.wait_for(buffer.take(3), 5))
        assert numbers == [3 * step, 3 * step + 1, 3 * step + 2]
        seen += [step - started[number] for number in numbers]
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
        version = step + 1
        await buffer.release(3)
    producer.cancel()
    assert max(seen) == bound
    assert min(seen) >= 0
