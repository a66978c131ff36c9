"""The driver's side of the engines: splits requests over replicas and speaks to all ranks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from megarl.config import RolloutConfig
from megarl.interfaces import Workers
from megarl.types import EngineStatus, GenerateRequest, Turn
from megarl.weights.transports.shm import StagingArea

T = TypeVar("T")


class VllmEngines:
    """A ``RolloutEngine`` over a group of ``VllmWorker`` processes.

    Rank ``replica * tensor_parallel + tp_rank`` of the group is rank ``tp_rank`` of engine ``replica``; the ranks of
    one engine must share a machine. One list of requests is sampled at a time: ranks of one engine stay in step only
    while they get the same calls in the same order, and a list's results then do not depend on what else is running.
    """

    def __init__(self, workers: Workers, config: RolloutConfig) -> None:
        expected = config.replicas * config.tensor_parallel
        if workers.size != expected:
            raise ValueError(
                f"{workers.name} has {workers.size} ranks and rollout.replicas x rollout.tensor_parallel needs "
                f"{expected}; start the group with {expected}"
            )
        self._workers, self._config = workers, config
        self._turn = asyncio.Lock()

    async def setup(self) -> list[str]:
        """Start all engines; one line per rank about what was started."""
        tp = self._config.tensor_parallel
        endpoints = await self._call("free_endpoint")
        args = [(rank % tp, endpoints[rank - rank % tp]) for rank in range(self._workers.size)]
        return await self._workers.call_each("setup", args, timeout_s=self._config.timeout_s)

    async def attach(self, area: StagingArea) -> None:
        """Map the shared memory that new weights come through, on every rank."""
        await self._call("attach", area)

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

    async def verify_staged(self, version: int) -> list[EngineStatus]:
        """Check the staged weights' checksums while generation goes on; one status per rank."""
        return await self._call("verify_staged", version)

    async def pause(self) -> None:
        """Let no request start; returns when none is running. Requests wait until ``resume``."""
        await self._turn.acquire()
        await self._call("pause")

    async def install(self, version: int) -> list[EngineStatus]:
        """Put the staged weights in place, keeping what is needed to undo it."""
        return await self._call("install", version)

    async def rollback(self) -> list[EngineStatus]:
        """Undo the last ``install`` bit for bit."""
        return await self._call("rollback")

    async def resume(self, version: int) -> None:
        """Serve ``version`` from now on: drop the undo, reset the prefix cache, go on."""
        await self._call("resume", version)
        self._turn.release()

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._workers.call(method, *args, timeout_s=self._config.timeout_s)


def share(items: Sequence[T], replica: int, replicas: int) -> Sequence[T]:
    """The ``replica``-th of ``replicas`` even, contiguous runs: siblings of one prompt mostly stay together."""
    return items[len(items) * replica // replicas : len(items) * (replica + 1) // replicas]
