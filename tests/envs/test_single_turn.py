from __future__ import annotations

from collections.abc import Sequence

from megarl.envs.single_turn import SingleTurn, sample_seed
from megarl.types import GenerateRequest, Prompt, Turn


class Letters:
    """A renderer whose tokens are characters."""

    def render(self, messages) -> tuple[int, ...]:
        return tuple(map(ord, messages[-1]["content"]))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Engine:
    """Answers every request with its prompt's last token; notes the calls."""

    def __init__(self) -> None:
        self.calls: list[list[GenerateRequest]] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Turn]:
        self.calls.append(list(requests))
        reasons = ("stop", "length")
        return [
            Turn(r.prompt_ids, r.prompt_ids[-1:], (-0.1,), version=4, finish_reason=reasons[n % 2])
            for n, r in enumerate(requests)
        ]


def _prompts(*texts: str) -> list[Prompt]:
    return [Prompt(number, ({"role": "user", "content": text},), "") for number, text in enumerate(texts, start=10)]


def _env(engine: Engine) -> SingleTurn:
    return SingleTurn(engine, Letters(), max_tokens=8, temperature=0.5, run_seed=3)  # type: ignore[arg-type]


async def test_all_attempts_are_one_call_and_come_back_by_prompt() -> None:
    engine = Engine()
    groups = await _env(engine).run(_prompts("ab", "cd"), step=4, group_size=2)
    assert len(engine.calls) == 1
    assert [group.prompt.number for group in groups] == [10, 11]
    assert [[t.text for t in group.trajectories] for group in groups] == [["b", "b"], ["d", "d"]]
    assert [t.status for t in groups[0].trajectories] == ["finished", "truncated"]
    assert {(r.max_tokens, r.temperature) for r in engine.calls[0]} == {(8, 0.5)}


async def test_seeds_come_from_run_seed_step_prompt_and_sample() -> None:
    engine = Engine()
    await _env(engine).run(_prompts("ab", "cd"), step=4, group_size=2)
    assert [r.seed for r in engine.calls[0]] == [sample_seed(3, 4, p, s) for p in (10, 11) for s in (0, 1)]


async def test_a_prompt_gets_the_same_seeds_whatever_it_is_called_with() -> None:
    together, alone = Engine(), Engine()
    await _env(together).run(_prompts("ab", "cd"), step=4, group_size=2)
    await _env(alone).run(_prompts("ab", "cd")[1:], step=4, group_size=2)
    assert alone.calls[0] == together.calls[0][2:]


def test_seeds_are_never_shared_and_never_change() -> None:
    keys = [(r, s, p, n) for r in range(3) for s in range(10) for p in range(64) for n in range(8)]
    assert len({sample_seed(*key) for key in keys}) > len(keys) - 5, "31 bits: about 0.05 collisions expected"
    assert sample_seed(1, 23, 4, 5) != sample_seed(12, 3, 4, 5)
    assert all(0 <= sample_seed(*key) < 2**31 for key in keys[:100])
