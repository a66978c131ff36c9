"""The other commands, and runs in other layouts than the default one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megarl.weights.hf_files import check_folder, read_headers
from megarl.weights.spec import ModelSpec
from tests.e2e.runs import CUT, ROOT, RUN_S, command, megarl, metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_S + 60)]

TINY = ROOT / "examples/policies/tiny_moe"
SHORT = (*CUT, "max_steps=2", "tracking.mlflow.enabled=false", "data.eval.num_prompts=16")


def _well(arguments: list[str]) -> str:
    done = megarl(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _assert_proven(run: Path, steps: int) -> None:
    rows = metrics(run)
    assert max(rows) == steps
    for step in range(1, steps + 1):
        assert rows[step]["sync/probe_max_diff"] < 1e-4
        assert rows[step]["policy/mismatch_kl"] < 1e-6


def test_a_pipeline_trainer_feeds_a_tensor_parallel_engine(tmp_path: Path) -> None:
    layout = ("trainer.parallel.tp=1", "trainer.parallel.pp=2", "trainer.parallel.ep=1", "rollout.tensor_parallel=2")
    _well(command("train", tmp_path, *SHORT, *layout))
    _assert_proven(tmp_path / "moe-grpo", 2)


def test_an_asynchronous_run_stays_within_its_staleness(tmp_path: Path) -> None:
    _well(command("train", tmp_path, *SHORT, "max_steps=4", "max_staleness=1"))
    rows = metrics(tmp_path / "moe-grpo")
    assert max(rows[step]["staleness/max"] for step in (1, 2, 3, 4)) == 1
    assert all(rows[step]["sync/probe_max_diff"] < 1e-4 for step in (1, 2, 3, 4))


def test_a_dense_tied_model_with_a_reference_and_two_updates(tmp_path: Path) -> None:
    model = tmp_path / "dense"
    _write_dense_model(model)
    layout = ("trainer.parallel.tp=1", "trainer.parallel.pp=2", "trainer.parallel.ep=1")
    algorithm = ("algorithm.kl.coef=0.01", "algorithm.updates_per_step=2", "algorithm.zero_spread=keep")
    _well(command("train", tmp_path, *SHORT, f"trainer.model={model}", *layout, *algorithm))
    rows = metrics(tmp_path / "moe-grpo")
    assert all(rows[step]["sync/probe_max_diff"] < 1e-4 for step in (1, 2))
    assert rows[1]["policy/kl_to_ref"] >= 0


def _write_dense_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "qwen2", **sizes, intermediate_size=96, vocab_size=320, max_position_embeddings=128, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder / name)


def test_a_policy_is_made_warm_started_trained_evaluated_exported_and_compared(tmp_path: Path) -> None:
    random, warm, exported = tmp_path / "random", tmp_path / "warm", tmp_path / "exported"
    _well([*command("init", tmp_path)[:5], str(random)])
    text = _well(
        command("sft", tmp_path, f"trainer.model={random}", f"sft.output={warm}", "sft.steps=3", "sft.batch_size=16")
    )
    first, last = (float(part) for part in text.split("loss ")[1].split(";")[0].split(" -> "))
    assert last < first
    check_folder(warm, ModelSpec.from_folder(warm))

    run = (*SHORT, "algorithm.zero_spread=keep")
    _well(command("train", tmp_path, *run))
    evaluated = _well(command("eval", tmp_path, *run))
    accuracy = metrics(tmp_path / "moe-grpo")[2]["eval/accuracy"]
    assert f"step 2: held-out accuracy {accuracy:.3f}" in evaluated

    arguments = command("export", tmp_path, *run)
    _well([*arguments[:5], str(exported), *arguments[5:]])
    check_folder(exported, ModelSpec.from_folder(exported))
    assert {header.dtype for header in read_headers(exported).values()} == {"BF16"}

    again = (*run, "name=again", "trainer.optimizer.lr=1e-4")
    _well(command("train", tmp_path, *again))
    pictures = tmp_path / "comparison"
    text = _well(
        [
            *command("train", tmp_path)[:3],
            *("compare", str(tmp_path / "moe-grpo"), str(tmp_path / "again"), "--output", str(pictures)),
        ]
    )
    assert "trainer.optimizer.lr" in text
    assert "reward/mean" in text
    assert {path.suffix for path in pictures.iterdir()} == {".png", ".html"}
