from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import DataConfig
from megarl.data.prompts import make_task
from megarl.data.renderer import Renderer
from megarl.policies.tiny import make_tiny_policy

QUESTION = "State the final answer to the following arithmetic problem: 15 - 43 ="


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("policy") / "tiny"
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    task = make_task(DataConfig(task="reasoning_gym/chain_sum", options=options), 0)
    make_tiny_policy(made, [task.train(n).messages[-1]["content"] for n in range(200)], seed=0)
    return made


def test_a_prompt_ends_where_the_answer_begins(folder: Path) -> None:
    renderer = Renderer(folder, 64)
    ids = renderer.render([{"role": "user", "content": QUESTION}])
    assert renderer.decode(ids) == QUESTION
    assert len(ids) < 40


def test_an_answer_ends_the_turn_and_reads_back(folder: Path) -> None:
    renderer = Renderer(folder, 64)
    ids = renderer.answer_ids("-28")
    assert len(ids) == 4, "sign, two digits, end of turn"
    assert renderer.decode(ids) == "-28"


def test_an_over_long_prompt_is_refused_with_its_beginning(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"exceeds data\.max_prompt_tokens \(5\): 'State the final"):
        Renderer(folder, 5).render([{"role": "user", "content": QUESTION}])
