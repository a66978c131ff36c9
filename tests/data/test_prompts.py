from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import DataConfig
from megarl.data.prompts import make_task

OPTIONS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def _gym(dataset: str = "chain_sum", *, heldout: int = 64, options: dict | None = None, **more: object) -> DataConfig:
    return DataConfig.model_validate(
        {
            "task": f"reasoning_gym/{dataset}",
            "options": OPTIONS if options is None else options,
            "eval": {"num_prompts": heldout},
            **more,
        }
    )


def _jsonl(folder: Path, train: list, heldout: list) -> DataConfig:
    for name, rows in (("train", train), ("eval", heldout)):
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return DataConfig(task="jsonl", path=folder / "train.jsonl", eval_path=folder / "eval.jsonl")


def _text(prompt) -> str:
    return prompt.messages[-1]["content"]


@pytest.mark.parametrize("seed", [0, 1])
def test_training_never_sees_a_held_out_problem(seed: int) -> None:
    task = make_task(_gym(heldout=512), seed)
    heldout = {_text(prompt) for prompt in task.heldout()}
    assert len(heldout) == 512
    assert heldout.isdisjoint(_text(task.train(number)) for number in range(5000))


def test_held_out_problems_are_the_same_for_every_seed() -> None:
    first, second = (make_task(_gym(), seed).heldout() for seed in (0, 9))
    assert first == second


def test_a_training_problem_depends_on_seed_and_number_alone() -> None:
    forwards = [make_task(_gym(), 3).train(number) for number in range(20)]
    task = make_task(_gym(), 3)
    assert [task.train(number) for number in reversed(range(20))] == forwards[::-1]
    assert [prompt.number for prompt in forwards] == list(range(20))
    assert [_text(make_task(_gym(), 4).train(number)) for number in range(20)] != [_text(p) for p in forwards]


def test_the_generators_own_answer_is_right_and_another_is_not() -> None:
    task = make_task(_gym(), 0)
    for number in range(50):
        prompt = task.train(number)
        answer = task.answer_text(prompt)
        assert task.verify(prompt, answer) == 1.0
        assert task.verify(prompt, f" {answer}\n") == 1.0
        assert task.verify(prompt, str(int(answer) + 1)) < 1.0
        assert task.verify(prompt, "") < 1.0


def test_the_verifier_runs_from_the_record() -> None:
    prompt = make_task(_gym(), 0).train(5)
    assert make_task(_gym(), 7).verify(prompt, json.loads(prompt.target)["answer"]) == 1.0


def test_a_misspelt_dataset_is_refused_with_the_close_one() -> None:
    with pytest.raises(ValueError, match=r"reasoning_gym/chain_sun.*did you mean reasoning_gym/chain_sum\?"):
        make_task(_gym("chain_sun"), 0)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.task \(maths\)"):
        make_task(DataConfig(task="maths"), 0)


@pytest.mark.parametrize("options", [{"min_term": 2}, {"min_terms": 5, "max_terms": 2}])
def test_options_that_do_not_fit_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"data\.options .* do not fit reasoning_gym/chain_sum"):
        make_task(_gym(options=options), 0)


def test_more_held_out_problems_than_there_are_is_refused_with_the_number_there_is() -> None:
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(
        ValueError, match=r"data\.eval\.num_prompts \(64\) .*use data\.eval\.num_prompts=(\d+)"
    ) as refused:
        make_task(_gym(options=small), 0).heldout()
    enough = int(str(refused.value).rpartition("=")[2])
    assert len(make_task(_gym(options=small, heldout=enough), 0).heldout()) == enough


def test_a_task_whose_every_problem_is_held_out_is_refused_not_searched_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megarl.data.prompts.is_held_out", lambda question: True)
    with pytest.raises(ValueError, match="too few problems"):
        make_task(_gym(), 0)


def test_the_held_out_part_does_not_depend_on_how_much_of_it_is_used() -> None:
    few, many = ({_text(p) for p in make_task(_gym(heldout=n), 0).heldout()} for n in (16, 256))
    assert few < many


def test_an_answer_in_tags_is_taken_out_of_the_text_around_it() -> None:
    task = make_task(_gym(), 0)
    prompt = task.train(0)
    assert task.verify(prompt, f"I think <answer>{task.answer_text(prompt)}</answer>, sir.") == 1.0


def test_the_system_prompt_comes_first() -> None:
    prompt = make_task(_gym(system_prompt="Be short."), 0).train(0)
    assert [m["role"] for m in prompt.messages] == ["system", "user"]
    assert prompt.messages[0]["content"] == "Be short."


def test_a_task_is_made_without_torch() -> None:
    code = (
        "import sys; from megarl.config import DataConfig; from megarl.data.prompts import make_task;"
        "make_task(DataConfig(task='reasoning_gym/chain_sum'), 0).train(0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_own_problems_leave_out_what_is_held_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(4)]
    task = make_task(_jsonl(tmp_path, rows, rows[1:2]), 0)
    assert [_text(task.train(n)) for n in range(4)] == ["0?", "2?", "3?", "0?"]
    assert [_text(prompt) for prompt in task.heldout()] == ["1?"]
    assert task.verify(task.train(1), " 2 ") == 1.0
    assert task.verify(task.train(1), "3") == 0.0


@pytest.mark.parametrize("line", ["not json", '{"prompt": "x"}', "[1]"])
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    good = {"prompt": "a", "answer": "b"}
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2 "):
        make_task(_jsonl(tmp_path, [good, line], [{"prompt": "c", "answer": "d"}]), 0)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.path .*must be a file"):
        make_task(DataConfig(task="jsonl", path=tmp_path / "none.jsonl"), 0)
