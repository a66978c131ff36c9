"""Runs in other layouts and modes than the default one: what the engines sample from is what the trainer holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import RUN_S, SHORT, TINY, Run, assert_proven, metrics, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(RUN_S + 30)]

FOUR_RANKS = ("trainer.parallel.world_size=4", "trainer.parallel.tp=2", "trainer.parallel.pp=2")


def test_four_trainer_ranks_with_pipeline_and_experts_feed_a_tensor_parallel_engine(tmp_path: Path) -> None:
    run = trained(tmp_path, *SHORT, *FOUR_RANKS, "trainer.parallel.ep=2", "rollout.tensor_parallel=2")
    assert_proven(run.folder, 2)


def test_a_dense_tied_model_over_four_ranks_with_a_reference_and_two_updates(tmp_path: Path) -> None:
    model = tmp_path / "dense"
    _write_dense_tied_model(model)
    layout = (f"trainer.model={model}", *FOUR_RANKS, "trainer.parallel.ep=1")
    algorithm = ("algorithm.kl.coef=0.01", "algorithm.updates_per_step=2", "algorithm.zero_spread=keep")
    run = trained(tmp_path, *SHORT, *layout, *algorithm)
    assert_proven(run.folder, 2)
    assert metrics(run.folder)[2]["policy/kl_to_ref"] > 0


def _write_dense_tied_model(folder: Path) -> None:
    """Random, with the default policy's tokenizer."""
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


def test_an_asynchronous_run_stays_within_its_staleness_and_weighs_what_is_stale(asynchronous: Run) -> None:
    rows = metrics(asynchronous.folder)
    assert max(rows[step]["staleness/max"] for step in (1, 2, 3, 4)) == 1
    assert all(rows[step]["sync/probe_max_diff"] < 1e-4 for step in (1, 2, 3, 4))
    for step in (1, 2, 3, 4):
        weighed = rows[step]["policy/mismatch_abs_diff"]
        assert (weighed > 1e-4) if rows[step]["staleness/max"] else (weighed < 1e-4)
