"""The plainest environment: one question, one answer."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.data.renderer import Renderer
from megarl.interfaces import RolloutEngine
from megarl.types import GenerateRequest, Prompt, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""How often one sample is tried before the run ends; its prompt or the engine is broken then."""
_STATUS: dict[str, TrajectoryStatus] = {"stop": "finished", "length": "truncated", "abort": "invalid"}


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """An ``Env`` that samples ``group_size`` answers to every prompt, all in one call of the engine."""

    engine: RolloutEngine
    renderer: Renderer
    max_tokens: int
    temperature: float
    run_seed: int

    async def run(self, prompts: Sequence[Prompt], *, step: int, group_size: int) -> list[TrajectoryGroup]:
        """Unscored groups in the order of ``prompts``."""
        requests = [
            GenerateRequest(
                prompt_ids=prompt_ids,
                seed=sample_seed(self.run_seed, step, prompt.number, sample),
                max_tokens=self.max_tokens,
                temperature=self.temperature,
            )
            for prompt in prompts
            for prompt_ids in [self.renderer.render(prompt.messages)]
            for sample in range(group_size)
        ]
        turns = await self._sample(requests, prompts, group_size)
        return [
            TrajectoryGroup(prompt, tuple(self._trajectory(prompt, turn) for turn in turns[first : first + group_size]))
            for prompt, first in zip(prompts, range(0, len(turns), group_size), strict=True)
        ]

    async def _sample(
        self, requests: Sequence[GenerateRequest], prompts: Sequence[Prompt], group_size: int
    ) -> list[Turn]:
        """One valid turn per request; what the engine aborts is sampled again, alone and with another seed.

        Raises:
            RuntimeError: samples were aborted ``MAX_ATTEMPTS`` times.
        """
        turns = list(await self.engine.generate(requests))
        for attempt in range(1, MAX_ATTEMPTS):
            aborted = _aborted(turns)
            if not aborted:
                return turns
            _log.warning("the engine aborted %d of %d samples; attempt %d", len(aborted), len(turns), attempt + 1)
            again = [replace(requests[n], seed=_another_seed(requests[n].seed, attempt)) for n in aborted]
            for n, turn in zip(aborted, await self.engine.generate(again), strict=True):
                turns[n] = turn
        if aborted := _aborted(turns):
            raise RuntimeError(
                f"{len(aborted)} of {len(turns)} samples were aborted by the engine {MAX_ATTEMPTS} times, "
                f"the first of prompt {prompts[aborted[0] // group_size].number}; see the engine log"
            )
        return turns

    def _trajectory(self, prompt: Prompt, turn: Turn) -> Trajectory:
        text = self.renderer.decode(turn.completion_ids)
        return Trajectory(prompt, [turn], text, status=_STATUS[turn.finish_reason])


def _aborted(turns: Sequence[Turn]) -> list[int]:
    return [number for number, turn in enumerate(turns) if turn.finish_reason == "abort"]


def _another_seed(seed: int | None, attempt: int) -> int | None:
    return None if seed is None else _hashed(f"{seed}/again/{attempt}")


def sample_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """A seed of 31 bits that depends on nothing else: not on restarts, replicas or the order of requests."""
    return _hashed(f"{run_seed}/{step}/{prompt}/{sample}")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
