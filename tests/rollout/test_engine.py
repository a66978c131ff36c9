"""The driver's side of the engines: which rank is asked for what, and when nobody may be asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from megarl.config import RolloutConfig
from megarl.rollout.engine import InFlight, VllmEngines, share
from megarl.types import GenerateRequest


class Ranks:
    """A group whose ranks answer with what they were asked, as ``VllmWorker`` would; only tp rank 0 has results."""

    name = "engine"

    def __init__(self, size: int, tensor_parallel: int) -> None:
        self.size, self._tp = size, tensor_parallel
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.release: asyncio.Event | None = None

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        self.asked.append((method, args))
        return [f"host:{rank}" for rank in range(self.size)]

    async def call_each(self, method: str, args: Sequence[tuple[Any, ...]], *, timeout_s: float) -> list[Any]:
        self.asked.append((method, tuple(args)))
        if self.release and method == "generate":
            await self.release.wait()
        return [args[rank][0] if rank % self._tp == 0 else None for rank in range(self.size)]


def _engines(replicas: int, tensor_parallel: int) -> tuple[VllmEngines, Ranks]:
    ranks = Ranks(replicas * tensor_parallel, tensor_parallel)
    return VllmEngines(ranks, RolloutConfig(replicas=replicas, tensor_parallel=tensor_parallel)), ranks


def _requests(count: int) -> list[GenerateRequest]:
    return [GenerateRequest((number,), seed=number, max_tokens=4, temperature=1.0) for number in range(count)]


@pytest.mark.parametrize(("count", "replicas"), [(7, 3), (2, 3), (0, 2), (8, 1)])
def test_shares_are_even_contiguous_and_complete(count: int, replicas: int) -> None:
    shares = [share(range(count), replica, replicas) for replica in range(replicas)]
    assert [item for part in shares for item in part] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("replicas", "tensor_parallel"), [(1, 1), (1, 2), (3, 1), (2, 2)])
async def test_answers_come_in_the_order_of_the_requests(replicas: int, tensor_parallel: int) -> None:
    engines, ranks = _engines(replicas, tensor_parallel)
    requests = _requests(7)
    assert await engines.generate(requests) == requests
    _, args = ranks.asked[-1]
    for rank in range(ranks.size):  # the ranks of one engine must be asked the same
        assert args[rank] == args[rank - rank % tensor_parallel]


async def test_the_ranks_of_an_engine_meet_at_one_endpoint() -> None:
    engines, ranks = _engines(2, 2)
    await engines.setup()
    assert ranks.asked[-1] == ("setup", ((0, "host:0"), (1, "host:0"), (0, "host:2"), (1, "host:2")))


async def test_requests_wait_while_the_engines_are_paused() -> None:
    engines, ranks = _engines(1, 1)
    await engines.pause()
    waiting = asyncio.create_task(engines.generate(_requests(1)))
    await asyncio.sleep(0.01)
    assert [method for method, _ in ranks.asked] == ["pause"]
    await engines.resume(3)
    assert await waiting == _requests(1)
    assert [method for method, _ in ranks.asked] == ["pause", "resume", "generate"]


@pytest.mark.parametrize("in_flight", ["abort", "keep"])
async def test_running_requests_can_be_interrupted(in_flight: InFlight) -> None:
    ranks = Ranks(1, 1)
    engines = VllmEngines(ranks, RolloutConfig(), in_flight)
    ranks.release = asyncio.Event()
    running = asyncio.create_task(engines.generate(_requests(1)))
    await asyncio.sleep(0.01)
    await engines.pause()
    assert ranks.asked[-1] == ("pause", (in_flight == "abort",))
    await engines.resume(3)
    ranks.release.set()
    assert await running == _requests(1)


async def test_every_rank_is_told_which_replica_it_belongs_to() -> None:
    engines, ranks = _engines(2, 2)
    await engines.attach("transport")
    assert ranks.asked[-1] == ("attach", (("transport", 0), ("transport", 0), ("transport", 1), ("transport", 1)))


def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine has 3 ranks and .* needs 4"):
        VllmEngines(Ranks(3, 2), RolloutConfig(replicas=2, tensor_parallel=2))
