"""The other commands, on what runs leave behind."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RunConfig, load
from megarl.data.prompts import make_task
from megarl.data.renderer import Renderer
from megarl.preflight import check
from megarl.weights.hf_files import read_headers
from tests.e2e.runs import CONFIG, CUT, RUN_S, TINY, Run, command, metrics, printed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_S + 60)]


def test_a_random_policy_is_warm_started_into_a_model_folder(tmp_path: Path) -> None:
    random, warm = tmp_path / "random", tmp_path / "warm"
    printed(command("init", tmp_path, arguments=(str(random),)))
    text = printed(
        command("sft", tmp_path, f"trainer.model={random}", f"sft.output={warm}", "sft.steps=3", "sft.batch_size=16")
    )
    first, last = (float(part) for part in text.split("loss ")[1].split(";")[0].split(" -> "))
    assert last < first
    check(load(CONFIG, [f"trainer.model={warm}"]))
    assert {header.dtype for header in read_headers(warm).values()} == {"BF16"}  # as its config.json says
    assert _answers(warm, load(CONFIG, ["data.eval.num_prompts=1"]))


def test_an_evaluation_repeats_what_the_run_measured_itself(whole: Run) -> None:
    last = metrics(whole.folder)[4]
    assert printed(command("eval", whole.folder.parent, *CUT)).strip() == (
        f"step 4: held-out accuracy {last['eval/accuracy']:.3f} on 32 problems, "
        f"{last['eval/completion_tokens_mean']:.1f} tokens an answer"
    )


def test_an_exported_policy_answers_in_transformers_as_it_did_in_the_run(whole: Run, tmp_path: Path) -> None:
    fp32, exported = _in_fp32(tmp_path / "fp32"), tmp_path / "exported"
    printed(command("export", whole.folder.parent, *CUT, f"trainer.model={fp32}", arguments=(str(exported),)))
    config = load(CONFIG, [*CUT, f"trainer.model={exported}"])
    check(config)
    task, answers = make_task(config.data, config.seed), _answers(exported, config)
    last = metrics(whole.folder)[4]
    texts = [Renderer(exported, 64).decode(ids) for ids in answers]
    right = [task.verify(prompt, text) for prompt, text in zip(task.heldout(), texts, strict=True)]
    assert sum(right) / len(right) == last["eval/accuracy"]
    assert sum(map(len, answers)) / len(answers) == last["eval/completion_tokens_mean"]


def _in_fp32(folder: Path) -> Path:
    """The default policy, saying that its weights are to be written in fp32."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


def _answers(model: Path, config: RunConfig) -> list[list[int]]:
    """Greedy completions of the held-out problems, sampled by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    renderer = Renderer(model, config.data.max_prompt_tokens)
    found = []
    for prompt in make_task(config.data, config.seed).heldout():
        ids = renderer.render(prompt.messages)
        out = policy.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=config.rollout.max_tokens)
        found.append(out[0, len(ids) :].tolist())
    return found


def test_two_runs_are_compared_in_text_and_pictures(whole: Run, asynchronous: Run, tmp_path: Path) -> None:
    runs = (str(whole.folder), str(asynchronous.folder))
    text = printed([sys.executable, "-m", "megarl.cli", "compare", *runs, "--output", str(tmp_path)])
    assert "max_staleness" in text
    assert "reward/mean" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "comparison.html").read_text()
    assert "max_staleness" in page
    assert "reward/mean" in page
