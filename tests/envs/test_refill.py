from __future__ import annotations

from collections.abc import Sequence

import pytest

from megarl.envs.single_turn import SingleTurn
from megarl.types import GenerateRequest, Prompt, Turn

PROMPTS = [Prompt(number, ({"role": "user", "content": "?"},), "") for number in range(2)]


class Renderer:
    def render(self, messages) -> tuple[int, ...]:
        return (1,)

    def decode(self, ids: Sequence[int]) -> str:
        return str(list(ids))


class FlakyEngine:
    """Aborts the second request of each of its first ``failures`` calls."""

    def __init__(self, failures: int) -> None:
        self.calls: list[list[GenerateRequest]] = []
        self._failures = failures

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Turn]:
        self.calls.append(list(requests))
        aborted = min(1, len(requests) - 1) if len(self.calls) <= self._failures else None
        return [
            Turn(r.prompt_ids, (), (), 0, "abort") if n == aborted else Turn(r.prompt_ids, (7,), (-0.1,), 0, "stop")
            for n, r in enumerate(requests)
        ]


def _env(engine: FlakyEngine) -> SingleTurn:
    return SingleTurn(engine, Renderer(), max_tokens=4, temperature=1.0, run_seed=0)  # type: ignore[arg-type]


async def test_an_aborted_sample_alone_is_sampled_again_with_another_seed() -> None:
    engine = FlakyEngine(failures=2)
    groups = await _env(engine).run(PROMPTS, step=0, group_size=2)
    assert [len(call) for call in engine.calls] == [4, 1, 1]
    assert len({call[min(1, len(call) - 1)].seed for call in engine.calls}) == 3
    assert {t.status for group in groups for t in group.trajectories} == {"finished"}


async def test_an_engine_that_keeps_aborting_ends_loudly() -> None:
    with pytest.raises(RuntimeError, match=r"1 of 4 samples .*prompt 0"):
        await _env(FlakyEngine(failures=99)).run(PROMPTS, step=0, group_size=2)
