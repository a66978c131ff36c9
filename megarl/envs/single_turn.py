"""The plainest environment: one question, one answer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.data.renderer import Renderer
from megarl.interfaces import RolloutEngine
from megarl.types import GenerateRequest, Prompt, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

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
        turns = await self.engine.generate(requests)
        return [
            TrajectoryGroup(prompt, tuple(self._trajectory(prompt, turn) for turn in turns[first : first + group_size]))
            for prompt, first in zip(prompts, range(0, len(turns), group_size), strict=True)
        ]

    def _trajectory(self, prompt: Prompt, turn: Turn) -> Trajectory:
        text = self.renderer.decode(turn.completion_ids)
        return Trajectory(prompt, [turn], text, status=_STATUS[turn.finish_reason])


def sample_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """A seed of 31 bits that depends on nothing else: not on restarts, replicas or the order of requests."""
    text = f"{run_seed}/{step}/{prompt}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1
