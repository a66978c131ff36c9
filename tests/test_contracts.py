"""What every implementation of a Protocol owes to those who use it. Trackers: tests/tracking/test_contract.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import DataConfig, RewardConfig
from megarl.data.prompts import Task, make_task
from megarl.interfaces import Placement
from megarl.orchestration.placement import Colocated, Disaggregated
from megarl.rewards import make_rewards
from megarl.types import Trajectory

TASKS = ("gym", "jsonl")


@pytest.fixture
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    if request.param == "gym":
        return make_task(DataConfig(task="reasoning_gym/chain_sum"), 0)
    for name, numbers in (("train", range(20)), ("heldout", range(15, 25))):
        rows = (json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in numbers)
        (tmp_path / name).write_text("\n".join(rows))
    return make_task(DataConfig(task="jsonl", path=tmp_path / "train", eval_path=tmp_path / "heldout"), 0)


@pytest.mark.parametrize("task", TASKS, indirect=True)
def test_a_task_gives_a_number_its_problem_whenever_it_is_asked(task: Task) -> None:
    first = [task.train(number) for number in range(30)]
    assert [task.train(number) for number in reversed(range(30))] == first[::-1]
    assert [prompt.number for prompt in first] == list(range(30))


@pytest.mark.parametrize("task", TASKS, indirect=True)
def test_a_task_never_trains_on_what_it_holds_out(task: Task) -> None:
    heldout = [prompt.messages for prompt in task.heldout()]
    assert heldout
    assert not any(task.train(number).messages in heldout for number in range(500))


@pytest.mark.parametrize("task", TASKS, indirect=True)
def test_a_tasks_own_answer_is_right_and_nonsense_is_not(task: Task) -> None:
    for prompt in task.heldout()[:5]:
        assert task.verify(prompt, task.answer_text(prompt)) == 1.0
        for nonsense in ("", "\0", "__import__('os')", "9" * 5000, "<answer></answer>"):
            assert task.verify(prompt, nonsense) < 1.0


@pytest.fixture
def own_reward(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text("def score(trajectory):\n    return float('7' in trajectory.text)\n")
    return f"{path}:score"


@pytest.mark.parametrize("name", ["task", "exact_match", "own"])
def test_a_reward_is_a_number_or_none_whatever_the_answer_is(name: str, own_reward: str) -> None:
    task = make_task(DataConfig(task="reasoning_gym/chain_sum"), 0)
    rubric = make_rewards([RewardConfig(name=own_reward if name == "own" else name)], task)
    for text in ("7", "", "\ud800", "1e999", "nan", "-" * 1000):
        trajectory = Trajectory(task.train(0), [], text, "finished")
        rubric.score(trajectory)
        assert trajectory.reward is None or 0.0 <= trajectory.reward <= 1.0
        assert len(trajectory.reward_parts) == 1


@pytest.mark.parametrize("make", [Colocated, Disaggregated])
async def test_a_placement_lets_the_trainer_work_again_and_again(make: Callable[[], Placement]) -> None:
    placement = make()
    for _ in range(3):
        async with placement.training():
            pass
