from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import DataConfig, RewardConfig
from megarl.data.prompts import make_task
from megarl.rewards import Rubric, make_rewards
from megarl.types import Prompt, Trajectory, Turn

PROMPT = Prompt(0, ({"role": "user", "content": "7 + 5 = ?"},), "12")


def _trajectory(text: str = "12", *, prompt: Prompt = PROMPT, status: str = "finished") -> Trajectory:
    return Trajectory(prompt, [Turn((1,), (2,), (-0.1,), 0, "stop")], text, status=status)  # type: ignore[arg-type]


def _scored(rubric: Rubric, trajectory: Trajectory) -> Trajectory:
    rubric.score(trajectory)
    return trajectory


def _gym():
    return make_task(DataConfig(task="reasoning_gym/chain_sum"), 0)


def test_the_reward_is_the_weighted_sum_and_the_parts_are_kept() -> None:
    scored = _scored(Rubric([("a", 2.0, lambda t: 0.5), ("b", -1.0, lambda t: 0.25)]), _trajectory())
    assert scored.reward == 0.75
    assert scored.reward_parts == {"a": 0.5, "b": 0.25}


def _raise(trajectory: Trajectory) -> float:
    raise RuntimeError("verifier broke")


@pytest.mark.parametrize("broken", [_raise, lambda t: None, lambda t: float("nan"), lambda t: float("inf")])
def test_a_reward_that_could_not_be_computed_is_none_never_zero(broken) -> None:
    scored = _scored(Rubric([("good", 1.0, lambda t: 1.0), ("bad", 1.0, broken)]), _trajectory())
    assert scored.reward is None
    assert scored.reward_parts == {"good": 1.0, "bad": None}


def test_an_invalid_trajectory_has_no_reward() -> None:
    assert _scored(Rubric([("a", 1.0, lambda t: 1.0)]), _trajectory(status="invalid")).reward is None


def test_task_and_exact_match_use_the_tasks_own_answer() -> None:
    task = _gym()
    prompt = task.train(0)
    rubric = make_rewards((RewardConfig(name="task"), RewardConfig(name="exact_match")), task)
    right = _scored(rubric, _trajectory(task.answer_text(prompt), prompt=prompt))
    assert right.reward_parts == {"task": 1.0, "exact_match": 1.0}


@pytest.mark.parametrize("text", ["9" * 4000, "1e999999999", "NaN", "__import__('os').abort()", "\x00", "(" * 4000])
def test_hostile_answers_are_just_wrong(text: str) -> None:
    task = _gym()
    scored = _scored(make_rewards((RewardConfig(name="task"),), task), _trajectory(text, prompt=task.train(0)))
    assert scored.reward is None or scored.reward < 1.0


def test_a_reward_of_ones_own_is_loaded_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def short(trajectory):\n    return 1.0 / len(trajectory.text)\n")
    rubric = make_rewards((RewardConfig(name=f"{tmp_path}/own.py:short"),), _gym())
    assert _scored(rubric, _trajectory("1234")).reward == 0.25


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taks", "must be task, exact_match or"),
        ("none.py:f", "no none.py"),
        ("{folder}/own.py:g", "has no g"),
        ("{folder}/broken.py:f", "can be imported: ModuleNotFoundError: No module named 'nowhere'; mend"),
    ],
)
def test_an_unknown_reward_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "own.py").write_text("def f(trajectory):\n    return 1.0\n")
    (tmp_path / "broken.py").write_text("import nowhere\n")
    with pytest.raises(ValueError, match=message):
        make_rewards((RewardConfig(name=name.format(folder=tmp_path)),), _gym())
