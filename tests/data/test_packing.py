from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.losses import policy_loss
from megarl.config import AlgorithmConfig, RunConfig, TrainerConfig
from megarl.data.packing import loss_weights, pack, pack_for_scoring
from megarl.types import IGNORE_LABEL, MicroBatch, Sample, TrainBatch

MODES = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]


def _sample(rng: np.random.Generator, group: int, *, in_loss: bool = True) -> Sample:
    prompt, answer = int(rng.integers(1, 6)), int(rng.integers(0, 9))
    length = prompt + answer
    mask = np.arange(length) >= prompt
    return Sample(
        token_ids=rng.integers(1, 50, length).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        group=group,
        version=0,
        reward=1.0,
        advantage=float(rng.normal()),
        in_loss=in_loss,
        old_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        ref_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
    )


def _samples(count: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [_sample(rng, group=n // 2, in_loss=bool(rng.random() < 0.8)) for n in range(count)]


def _config(*, budget: int = 64, loss: str = "token_mean", tp: int = 1, updates: int = 1) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "t",
            "max_steps": 1,
            "prompts_per_step": 4,
            "group_size": 2,
            "data": {"task": "jsonl", "max_prompt_tokens": 8},
            "algorithm": {"loss": loss, "updates_per_step": updates, "kl": {"coef": 0.1}},
            "trainer": {
                "model": "m",
                "max_tokens_per_micro_batch": budget,
                "parallel": {"tp": tp, "world_size": tp},
            },
            "rollout": {"max_tokens": 8, "max_model_len": 16},
        }
    )


def _token_logprob(batch: MicroBatch) -> torch.Tensor:
    """A stand-in for a model: a function of a token and its label alone."""
    tokens, labels = torch.tensor(batch.tokens).double(), torch.tensor(batch.labels).double()
    return -torch.sigmoid(torch.sin(tokens * 0.7 + labels * 1.3))


def _loss(batch: TrainBatch, config: AlgorithmConfig) -> float:
    total = 0.0
    for micro_batch in (m for rank in batch.micro_batches for m in rank):

        class Tensors:
            loss_weights = torch.tensor(micro_batch.loss_weights, dtype=torch.float64)
            advantages = torch.tensor(micro_batch.advantages, dtype=torch.float64)
            rollout_logprobs = torch.tensor(micro_batch.rollout_logprobs, dtype=torch.float64)
            old_logprobs = None if micro_batch.old_logprobs is None else torch.tensor(micro_batch.old_logprobs).double()
            ref_logprobs = None if micro_batch.ref_logprobs is None else torch.tensor(micro_batch.ref_logprobs).double()

        total += float(policy_loss(_token_logprob(micro_batch), None, Tensors(), config)[0])
    return total


@pytest.mark.parametrize("mode", MODES)
@given(count=st.integers(0, 14), seed=st.integers(0, 1000), budget=st.integers(16, 80), dp=st.integers(1, 4))
def test_loss_does_not_depend_on_packing(mode: str, count: int, seed: int, budget: int, dp: int) -> None:
    """One by one, at any budget and any data-parallel size: the same sum to 1e-6."""
    samples = _samples(count, seed)
    (alone,) = pack(samples, _config(budget=16, loss=mode), dp_size=1)
    (packed,) = pack(samples, _config(budget=budget, loss=mode, tp=2), dp_size=dp)
    config = _config(loss=mode).algorithm
    assert packed.num_loss_tokens == alone.num_loss_tokens == sum(s.num_loss_tokens for s in samples)
    assert _loss(packed, config) == pytest.approx(_loss(alone, config), abs=1e-6)


@given(count=st.integers(0, 14), seed=st.integers(0, 1000), dp=st.integers(1, 4), tp=st.sampled_from([1, 2, 4]))
def test_ranks_have_equally_many_micro_batches_within_the_budget(count: int, seed: int, dp: int, tp: int) -> None:
    (batch,) = pack(_samples(count, seed), _config(budget=20, tp=tp), dp_size=dp)
    assert len(batch.micro_batches) == dp
    assert len({len(rank) for rank in batch.micro_batches}) == 1
    for micro_batch in (m for rank in batch.micro_batches for m in rank):
        assert len(micro_batch.tokens) > 0
        assert len(micro_batch.tokens) % tp == 0
        assert len(micro_batch.tokens) < 20 + tp
        assert micro_batch.cu_seqlens[-1] == len(micro_batch.tokens)
        assert (np.diff(micro_batch.cu_seqlens) > 0).all()


def test_arrays_speak_of_the_next_token_of_the_same_segment() -> None:
    sample = Sample(
        token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        rollout_logprobs=np.array([0, 0, -0.5, -0.25], dtype=np.float32),
        group=0,
        version=0,
        reward=1.0,
        advantage=2.0,
    )
    (batch,) = pack([sample], _config(tp=8), dp_size=1)
    ((micro_batch,),) = batch.micro_batches
    assert micro_batch.tokens.tolist() == [5, 6, 7, 8, 0, 0, 0, 0]
    assert micro_batch.labels.tolist() == [6, 7, 8] + [IGNORE_LABEL] * 5
    assert micro_batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert micro_batch.cu_seqlens.tolist() == [0, 4, 8]
    assert micro_batch.loss_weights.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, 0]
    assert micro_batch.rollout_logprobs.tolist() == [0, -0.5, -0.25, 0, 0, 0, 0, 0]
    assert micro_batch.advantages[1:3].tolist() == [2.0, 2.0]


def test_loss_weights_by_hand() -> None:
    """Completions of 2 and 6 tokens, one of 0 and one out of the loss; 10 tokens are allowed."""
    samples = []
    for tokens, in_loss in ((2, True), (6, True), (0, True), (4, False)):
        mask = np.arange(1 + tokens) > 0
        samples.append(Sample(mask.astype(np.int32), mask, mask * 0.0, 0, 0, 1.0, in_loss=in_loss))
    expected = {
        "token_mean": [1 / 8, 1 / 8],
        "sequence_mean_token_mean": [1 / 4, 1 / 12],
        "sequence_mean_token_sum": [1 / 2, 1 / 2],
        "constant": [1 / 20, 1 / 20],
    }
    for mode, weights in expected.items():
        assert loss_weights(samples, mode, 10) == [*weights, 0.0, 0.0]


def test_the_weights_of_a_step_add_up_to_one_under_token_mean() -> None:
    (batch,) = pack(_samples(14), _config(), dp_size=2)
    total = math.fsum(float(m.loss_weights.sum(dtype=np.float64)) for rank in batch.micro_batches for m in rank)
    assert total == pytest.approx(1.0, abs=1e-6)


def test_updates_share_the_groups_in_order_and_have_their_own_denominators() -> None:
    samples = _samples(8)
    batches = pack(samples, _config(updates=2), dp_size=1)
    assert [b.num_loss_tokens for b in batches] == [
        sum(s.num_loss_tokens for s in samples if s.group in groups) for groups in ((0, 1), (2, 3))
    ]
    for batch in batches:
        weights = np.concatenate([m.loss_weights for m in batch.micro_batches[0]])
        assert weights.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("samples", [[], [_sample(np.random.default_rng(0), 0, in_loss=False)]])
def test_a_step_without_loss_tokens_is_an_empty_batch_that_every_rank_can_run(samples: list[Sample]) -> None:
    (batch,) = pack(samples, _config(tp=2), dp_size=2)
    assert batch.num_loss_tokens == 0
    assert all(len(rank) == 1 and not rank[0].loss_mask.any() for rank in batch.micro_batches)


def test_packing_repeats_exactly() -> None:
    first, second = (pack(_samples(14), _config(budget=24), dp_size=2)[0] for _ in range(2))
    for a, b in zip(first.micro_batches, second.micro_batches, strict=True):
        assert [m.tokens.tolist() for m in a] == [m.tokens.tolist() for m in b]


@given(count=st.integers(1, 14), seed=st.integers(0, 1000), dp=st.integers(1, 3), budget=st.integers(16, 60))
def test_scores_come_back_to_their_samples(count: int, seed: int, dp: int, budget: int) -> None:
    samples = _samples(count, seed)
    trainer = TrainerConfig.model_validate({"model": "m", "max_tokens_per_micro_batch": budget})
    packed = pack_for_scoring(samples, trainer, dp_size=dp)
    found = packed.unpack([[m.labels.astype(np.float32) for m in rank] for rank in packed.micro_batches])
    for sample, scores in zip(samples, found, strict=True):
        assert scores.tolist() == [0.0, *sample.token_ids[1:].tolist()]
