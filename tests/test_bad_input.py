"""A mistake of the user's is refused before anything starts: one message, with a way out that works, and status 2."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config import load
from megarl.config_errors import ConfigError
from megarl.preflight import check
from tests.e2e.runs import CONFIG, ROOT

TINY = ROOT / "examples/policies/tiny_moe"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def _refusal(capsys: pytest.CaptureFixture[str], *overrides: str, verb: str = "train") -> str:
    """What ``megarl train`` says; it must end with status 2 and without a traceback."""
    with pytest.raises(SystemExit) as ended:
        main([verb, str(CONFIG), *overrides])
    text = capsys.readouterr().err
    assert ended.value.code == 2, text
    assert "Traceback" not in text
    return text


CASES = {
    "an unknown key": (["rollout.temprature=1.0"], ["rollout.temprature", "temperature"]),
    "an unknown section": (["rolout.temperature=1.0"], ["rolout", "rollout"]),
    "a wrong type": (["max_steps=many"], ["max_steps", "many"]),
    "a wrong choice": (["algorithm.name=gropo"], ["algorithm.name", "gropo", "grpo"]),
    "a number out of range": (["trainer.optimizer.lr=-1"], ["trainer.optimizer.lr", "-1"]),
    "a world that does not divide": (["trainer.parallel.world_size=3"], ["trainer.parallel.world_size", "3"]),
    "tp that the heads do not divide by": (
        ["trainer.parallel.world_size=8", "trainer.parallel.tp=8"],
        ["trainer.parallel.tp", "8"],
    ),
    "pp that the layers do not divide by": (
        ["trainer.parallel.world_size=6", "trainer.parallel.pp=3", "trainer.parallel.tp=2", "trainer.parallel.ep=1"],
        ["trainer.parallel.pp", "3"],
    ),
    "ep that the experts do not divide by": (
        ["trainer.parallel.ep=3", "trainer.parallel.world_size=6", "prompts_per_step=66"],
        ["trainer.parallel.ep", "3"],
    ),
    "a batch that dp does not divide": (
        ["trainer.parallel.world_size=6", "prompts_per_step=7", "trainer.parallel.ep=1", "group_size=2"],
        ["prompts_per_step"],
    ),
    "a micro-batch that holds no sequence": (
        ["trainer.max_tokens_per_micro_batch=16"],
        ["trainer.max_tokens_per_micro_batch", "16"],
    ),
    "a group of one": (["group_size=1"], ["group_size", "1"]),
    "temperature 0": (["rollout.temperature=0"], ["rollout.temperature", "0"]),
    "top_p below 1": (["rollout.top_p=0.9"], ["rollout.top_p", "0.9"]),
    "top_k": (["rollout.top_k=5"], ["rollout.top_k", "5"]),
    "virtual pipelines": (["trainer.parallel.vpp=2"], ["trainer.parallel.vpp", "2"]),
    "context parallelism": (
        ["trainer.parallel.cp=2", "trainer.parallel.world_size=4"],
        ["trainer.parallel.cp", "2"],
    ),
    "experts dealt out in turn without groups": (
        ["rollout.expert_parallel=true", "rollout.expert_placement=round_robin"],
        ["rollout.expert_placement", "round_robin"],
    ),
    "a pipeline layout with too few layers": (
        [
            "trainer.parallel.tp=1",
            "trainer.parallel.ep=1",
            "trainer.parallel.pp=2",
            "trainer.parallel.pipeline_layout=Ett|tL",
        ],
        ["trainer.parallel.pipeline_layout", "Ett|tL", "all 4 layers"],
    ),
    "a pipeline layout of other stages": (
        [
            "trainer.parallel.tp=1",
            "trainer.parallel.ep=1",
            "trainer.parallel.pp=2",
            "trainer.parallel.pipeline_layout=Etttt|t|L",
        ],
        ["trainer.parallel.pipeline_layout", "Etttt|t|L", "pp x vpp (2) parts"],
    ),
    "an fp8 recipe without a GPU": (["trainer.precision.recipe=blockwise"], ["trainer.precision.recipe", "blockwise"]),
    "a missing model folder": (["trainer.model=/nowhere"], ["trainer.model", "/nowhere"]),
    "a task that does not exist": (["data.task=reasoning_gym/chain_sun"], ["data.task", "chain_sun", "chain_sum"]),
    "an option that the task does not have": (["data.options.max_digit=2"], ["data.options", "max_digit"]),
    "more held-out problems than there are": (
        ["data.options.max_digits=1", "data.options.min_digits=1"],
        ["data.eval.num_prompts", "512"],
    ),
    "a key without its section": (["tp=2"], ["unknown key tp (2)", "trainer.parallel.tp"]),
    "true for a number": (["max_steps=true"], ["max_steps", "true", "whole number"]),
    "a number that is not finite": (["rollout.temperature=.nan"], ["rollout.temperature", "finite"]),
    "a value for a section": (["data.eval=5"], ["data.eval", "5", "section"]),
    "a key below a value": (["seed.value=3"], ["seed", "section"]),
    "no room for prompt and completion": (
        ["rollout.max_model_len=70"],
        ["rollout.max_model_len", "70", "data.max_prompt_tokens (64)", "rollout.max_tokens (12)"],
    ),
    "a sequence longer than the model's positions": (
        ["rollout.max_model_len=4096"],
        ["rollout.max_model_len", "4096", "max_position_embeddings (512)"],
    ),
    "a completion longer than the model's positions": (
        ["rollout.max_tokens=4000", "rollout.max_model_len=4096", "trainer.max_tokens_per_micro_batch=8192"],
        ["rollout.max_model_len", "4096", "max_position_embeddings (512)"],
    ),
    "an engine that the heads do not divide by": (["rollout.tensor_parallel=3"], ["rollout.tensor_parallel", "3"]),
    "experts too narrow for the CPU kernel": (["rollout.tensor_parallel=4"], ["rollout.tensor_parallel", "4", "32"]),
    "a transport that does not exist": (["weights.transport=nccl"], ["weights.transport", "nccl", "shm"]),
    "a learning rate that rises": (["trainer.optimizer.min_lr=1"], ["trainer.optimizer.min_lr", "1"]),
    "no reward": (["rewards=[]"], ["rewards"]),
    "a reward that does not exist": (["rewards=[{name: taks}]"], ["rewards", "taks"]),
    "an override without a value": (["max_steps"], ["max_steps"]),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_with_key_and_value(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, words = CASES[case]
    text = _refusal(capsys, *overrides)
    for word in words:
        assert word in text, text


@pytest.mark.parametrize("case", CASES)
def test_following_its_advice_leads_to_a_config_that_runs(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, _ = CASES[case]
    for _ in range(3):  # one rule at a time
        text = _refusal(capsys, *overrides)
        remedies = re.findall(r"(?:use|and|one such as) ([a-z_.]+=(?:[\[{].*?[\]}]+|[^\s,;]+))", text)
        assert remedies, text
        keys = {remedy.partition("=")[0] for remedy in remedies}
        mistakes = [o for o in overrides if o.partition("=")[0] in keys] or overrides[:1]
        overrides = [*(o for o in overrides if o not in mistakes), *remedies]
        try:
            check(load(CONFIG, overrides))
        except ConfigError:
            continue
        return
    raise AssertionError(overrides)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "cut off"])
def test_a_damaged_model_is_refused(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.gate.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        name = "model.layers.9.mlp.gate.weight"
        tensors[name] = torch.zeros(8, 128)
    elif damage == "shape":
        tensors[name] = torch.zeros(7, 128)
    save_file(tensors, path)
    if damage == "cut off":
        name = str(path)
        path.write_bytes(path.read_bytes()[:-10])
    assert name in _refusal(capsys, f"trainer.model={tmp_path / 'model'}")


def test_a_parallel_size_is_only_advised_with_a_world_that_it_divides(capsys: pytest.CaptureFixture[str]) -> None:
    text = _refusal(capsys, "trainer.parallel={world_size: 3, tp: 3}")
    assert "use trainer.parallel.tp=2 and trainer.parallel.world_size=2" in text


def test_a_length_is_only_advised_with_parts_that_fit_into_it(capsys: pytest.CaptureFixture[str]) -> None:
    text = _refusal(capsys, "rollout.max_tokens=4000", "rollout.max_model_len=4096")
    assert "use rollout.max_model_len=512 and data.max_prompt_tokens=64 and rollout.max_tokens=448" in text


@pytest.mark.parametrize(
    ("file", "words"), [("tokenizer.json", ["tokenizer"]), ("chat_template.jinja", ["chat template"])]
)
def test_a_model_without_its_tokenizer_is_refused(
    file: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / file).unlink()
    text = _refusal(capsys, f"trainer.model={tmp_path / 'model'}")
    for word in ("trainer.model", str(tmp_path / "model"), *words):
        assert word in text


def test_a_model_that_is_not_supported_is_refused_with_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    text = _refusal(capsys, f"trainer.model={tmp_path}")
    for word in ("trainer.model", "gpt2", "qwen3_moe"):
        assert word in text


@pytest.mark.parametrize("verb", ["sft", "init", "export", "upcycle"])
def test_an_output_that_exists_is_refused_before_the_work(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "sft": [str(CONFIG), f"sft.output={tmp_path}"],
        "init": [str(CONFIG), str(tmp_path)],
        "export": [str(CONFIG), str(tmp_path)],
        "upcycle": ["smollm2", str(tmp_path)],
    }
    with pytest.raises(SystemExit) as ended:
        main([verb, *arguments[verb]])
    text = capsys.readouterr().err
    assert ended.value.code == 2
    assert ("sft.output" if verb == "sft" else "OUTPUT") + f" ({tmp_path}) must not exist" in text
    assert f"={tmp_path}-2" in text


def test_what_a_cpu_cannot_do_may_be_planned_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(CONFIG), "rollout.tensor_parallel=4", "trainer.precision.recipe=blockwise"])
    assert "engines    1 x tensor parallel 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "verb", ["train", "sft", "init", "eval", "import", "export", "plan", "compare", "upcycle", "env"]
)
def test_help_says_in_one_line_what_a_command_does(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    listed = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == [verb])
    assert listed.endswith(".")
    assert not listed.endswith("...")


def test_a_config_that_is_not_there_or_not_yaml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, text in ((tmp_path / "no.yaml", None), (tmp_path / "bad.yaml", "a: [1"), (tmp_path / "list.yaml", "- 1")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["train", str(path)])
        assert ended.value.code == 2
        assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "mistake"),
    [
        ("train", "data.task=reasoning_gym/nothing_like_it"),
        ("train", "rollout.temprature=1.0"),
        ("sft", "trainer.model=/nowhere"),
        ("eval", "group_size=1"),
        ("plan", "trainer.parallel.world_size=3"),
    ],
)
def test_it_takes_less_than_five_seconds_and_starts_nothing(verb: str, mistake: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "megarl.cli", verb, str(CONFIG), mistake]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert mistake.partition("=")[0] in done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # of a core, however busy it is
    assert done.stdout == ""
    assert done.stderr.count("megarl:") == 1
    assert "Traceback" not in done.stderr


def test_the_plan_of_the_big_model_needs_no_weights_and_training_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "configs/qwen3_30b_a3b_grpo.yaml"
    main(["plan", str(config)])
    text = capsys.readouterr().out
    for words in ("30.532 B", "ep 8", "memory per trainer rank", "1024 sequences"):
        assert words in text
    with pytest.raises(SystemExit) as ended:
        main(["train", str(config)])
    assert ended.value.code == 2
    assert json.loads((ROOT / "configs/models/Qwen3-30B-A3B/config.json").read_text())["num_experts"] == 128
