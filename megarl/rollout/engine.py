"""The driver's side of the engines: splits requests over replicas and speaks to all ranks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from megarl.config import RolloutConfig
from megarl.interfaces import Workers
from megarl.types import EngineStatus, GenerateRequest, Turn
from megarl.weights.transports.transport import Transport

T = TypeVar("T")
InFlight = Literal["wait", "abort", "keep"]


class VllmEngines:
    """A ``RolloutEngine`` over a group of ``VllmWorker`` processes.

    Rank ``replica * tensor_parallel + tp_rank`` of the group is rank ``tp_rank`` of engine ``replica``; the ranks of
    one engine must share a machine. One list of requests is sampled at a time: ranks of one engine stay in step only
    while they get the same calls in the same order, and a list's results then do not depend on what else is running.
    """

    def __init__(self, workers: Workers, config: RolloutConfig, in_flight: InFlight = "wait") -> None:
        expected = config.replicas * config.tensor_parallel
        if workers.size != expected:
            raise ValueError(
                f"{workers.name} has {workers.size} ranks and rollout.replicas x rollout.tensor_parallel needs "
                f"{expected}; start the group with {expected}"
            )
        self._workers, self._config, self._in_flight = workers, config, in_flight
        self._turn = asyncio.Lock()

    async def setup(self) -> list[str]:
        """Start all engines; one line per rank about what was started."""
        tp = self._config.tensor_parallel
        endpoints = await self._call("free_endpoint")
        args = [(rank % tp, endpoints[rank - rank % tp]) for rank in range(self._workers.size)]
        return await self._workers.call_each("setup", args, timeout_s=self._config.timeout_s)

    async def attach(self, transport: Transport) -> None:
        """Connect every rank to what new weights come through."""
        await self._call_with_replica("attach", transport)

    async def close(self) -> None:
        """Stop all engines."""
        await self._call("close")

    # --- sampling --------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Turn]:
        """One turn per request, in order. Replica r of R takes the r-th of R even runs of the list."""
        return await self._split("generate", requests)

    async def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Log-probability of every token but the first given the ones before it."""
        return await self._split("score", sequences)

    async def _split(self, method: str, items: Sequence[Any]) -> list[Any]:
        replicas, tp = self._config.replicas, self._config.tensor_parallel
        shares = [share(items, replica, replicas) for replica in range(replicas)]
        args = [(shares[rank // tp],) for rank in range(self._workers.size)]
        async with self._turn:
            answers = await self._workers.call_each(method, args, timeout_s=self._config.timeout_s)
        return [answer for replica in range(replicas) for answer in answers[replica * tp]]

    # --- weights ---------------------------------------------------------------------------------------------------

    async def receive(self, version: int) -> list[EngineStatus]:
        """Take the weights being staged and check them while generation goes on; one status per rank."""
        return await self._call("receive", version)

    async def pause(self) -> None:
        """Sample no more; returns when nothing is computed. New requests wait until ``resume``.

        Running requests are finished first (``wait``), end as aborted (``abort``), or stand still (``keep``).
        """
        if self._in_flight == "wait":
            await self._turn.acquire()
        await self._call("pause", self._in_flight == "abort")

    async def install(self, version: int) -> list[EngineStatus]:
        """Put the staged weights in place, keeping what is needed to undo it."""
        return await self._call("install", version)

    async def rollback(self) -> list[EngineStatus]:
        """Undo the last ``install`` bit for bit."""
        return await self._call("rollback")

    async def resume(self, version: int) -> None:
        """Serve ``version`` from now on: drop the undo, reset the prefix cache, go on."""
        await self._call("resume", version)
        if self._in_flight == "wait":
            self._turn.release()

    async def _call_with_replica(self, method: str, *args: Any) -> None:
        tp = self._config.tensor_parallel
        each = [(*args, rank // tp) for rank in range(self._workers.size)]
        await self._workers.call_each(method, each, timeout_s=self._config.timeout_s)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._workers.call(method, *args, timeout_s=self._config.timeout_s)


def share(items: Sequence[T], replica: int, replicas: int) -> Sequence[T]:
    """The ``replica``-th of ``replicas`` even, contiguous runs: siblings of one prompt mostly stay together."""
    return items[len(items) * replica // replicas : len(items) * (replica + 1) // replicas]
