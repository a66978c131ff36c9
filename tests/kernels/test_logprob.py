from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as mp

from megarl_kernels.logprob import logprob_entropy
from megarl_kernels.reference import logprob_entropy_reference

IGNORE = -100


def _inputs(rows: int, width: int, *, scale: float = 3.0, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return logits, torch.randint(0, width, (rows,), generator=generator)


def test_hand_computed_values() -> None:
    out = logprob_entropy(torch.log(torch.tensor([[1.0, 3.0], [1.0, 1.0]])), torch.tensor([1, 0]), entropy="metric")
    expected = torch.tensor([0.75, 0.5]).log()
    torch.testing.assert_close(out.logprob, expected, atol=1e-6, rtol=0)
    entropy = torch.tensor([0.5623351, 0.6931472])
    torch.testing.assert_close(out.entropy, entropy, atol=1e-6, rtol=0)
    torch.testing.assert_close(out.lse, torch.tensor([4.0, 2.0]).log(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", [1, 7, 257])
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_fp32_equals_the_float64_oracle(width: int, offset: float) -> None:
    logits, labels = _inputs(33, width)
    logits = logits + offset
    out = logprob_entropy(logits, labels, entropy="metric", chunk_rows=8)
    logprob, entropy, lse = logprob_entropy_reference(logits, labels)
    torch.testing.assert_close(out.logprob.double(), logprob, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.entropy.double(), entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.lse.double(), lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0])])
def test_gradients_pass_finite_differences(temperature: float | torch.Tensor) -> None:
    logits, labels = _inputs(5, 6, dtype=torch.float64)
    labels[2] = IGNORE

    def both(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = logprob_entropy(z, labels, temperature=temperature, entropy="grad", valid_vocab=5, chunk_rows=2)
        assert out.entropy is not None
        return out.logprob, out.entropy

    labels[labels == 5] = 0
    assert torch.autograd.gradcheck(both, logits.requires_grad_())


def test_gradient_equals_autograd_through_the_oracle() -> None:
    logits, labels = _inputs(16, 50, scale=10.0)
    weight = torch.randn(2, 16)
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    out = logprob_entropy(mine, labels, temperature=1.3, entropy="grad", chunk_rows=5)
    (weight[0] * out.logprob + weight[1] * out.entropy).sum().backward()
    logprob, entropy, _ = logprob_entropy_reference(theirs, labels, temperature=1.3)
    (weight[0] * logprob + weight[1] * entropy).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def test_entropy_as_a_metric_has_no_gradient() -> None:
    logits, labels = _inputs(4, 9)
    out = logprob_entropy(logits.requires_grad_(), labels, entropy="metric")
    assert out.entropy is not None
    assert not out.entropy.requires_grad
    assert not out.lse.requires_grad
    assert logprob_entropy(logits, labels).entropy is None


def test_chunking_does_not_change_a_bit() -> None:
    logits, labels = _inputs(37, 65)
    whole, parts = (logprob_entropy(logits, labels, entropy="metric", chunk_rows=n) for n in (64, 3))
    assert torch.equal(whole.logprob, parts.logprob)
    assert torch.equal(whole.entropy, parts.entropy)


def test_padding_columns_have_no_probability_and_no_gradient() -> None:
    logits, labels = _inputs(6, 12)
    labels %= 10
    padded = torch.cat([logits[:, :10], torch.full((6, 2), 1e30)], dim=1).requires_grad_()
    out = logprob_entropy(padded, labels, entropy="grad", valid_vocab=10)
    torch.testing.assert_close(out.logprob, logprob_entropy(logits[:, :10], labels).logprob)
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert torch.equal(padded.grad[:, 10:], torch.zeros(6, 2))
    assert torch.isfinite(padded.grad).all()


def test_excluded_columns_are_legal() -> None:
    logits, labels = _inputs(3, 5)
    logits[:, 4] = -torch.inf
    logits.requires_grad_()
    out = logprob_entropy(logits, labels % 4, entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    torch.testing.assert_close(out.logprob, logprob_entropy(logits[:, :4], labels % 4).logprob)
    assert torch.equal(logits.grad[:, 4], torch.zeros(3))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_an_ignored_row_reaches_nothing(poison: float) -> None:
    logits, labels = _inputs(4, 6)
    logits[1], labels[1] = poison, IGNORE
    logits.requires_grad_()
    out = logprob_entropy(logits, labels, entropy="grad")
    (out.logprob.sum() + out.entropy.sum()).backward()
    assert out.logprob[1] == out.entropy[1] == out.lse[1] == 0
    assert torch.equal(logits.grad[1], torch.zeros(6))
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_without_incoming_gradient_gets_exactly_zero(poison: float) -> None:
    logits, labels = _inputs(3, 6)
    logits[2] = poison
    logits.requires_grad_()
    out = logprob_entropy(logits, labels, entropy="grad")
    (out.logprob[:2].sum() + out.entropy[:2].sum()).backward()
    assert torch.equal(logits.grad[2], torch.zeros(6))
    assert torch.isfinite(logits.grad).all()


def test_no_tokens_give_empty_results() -> None:
    logits = torch.empty(0, 4, requires_grad=True)
    out = logprob_entropy(logits, torch.empty(0, dtype=torch.long), entropy="grad")
    assert out.logprob.shape == out.entropy.shape == (0,)


def test_bf16_logits_get_bf16_gradients_and_fp32_results() -> None:
    logits, labels = _inputs(4, 8, dtype=torch.bfloat16)
    out = logprob_entropy(logits.requires_grad_(), labels)
    out.logprob.sum().backward()
    assert (out.logprob.dtype, logits.grad.dtype) == (torch.float32, torch.bfloat16)


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature \(0\) must be > 0"):
        logprob_entropy(*_inputs(2, 3), temperature=0)


def _split_vocabulary(rank: int, port: int, folder: str) -> None:
    """One of two ranks: half of 10 columns, of which the last 3 are padding (rank 1 keeps 2)."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    logits, labels = _inputs(9, 10)
    labels %= 7
    labels[:3] = torch.tensor([4, 5, IGNORE])  # the last and first column of a shard
    mine = logits[:, rank * 5 : rank * 5 + 5].clone().requires_grad_()
    out = logprob_entropy(
        mine, labels, entropy="grad", valid_vocab=7, vocab_start=rank * 5, tp_group=torch.distributed.group.WORLD
    )
    (out.logprob.sum() + 0.5 * out.entropy.sum()).backward()
    torch.save((out.logprob.detach(), out.entropy.detach(), mine.grad), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_vocabulary_shards_equal_one_and_agree_bit_for_bit(tmp_path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_split_vocabulary, args=(port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    logits, labels = _inputs(9, 10)
    labels %= 7
    labels[:3] = torch.tensor([4, 5, IGNORE])
    whole = logprob_entropy(logits.requires_grad_(), labels, entropy="grad", valid_vocab=7)
    (whole.logprob.sum() + 0.5 * whole.entropy.sum()).backward()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    torch.testing.assert_close(first[0], whole.logprob, atol=3e-6, rtol=0)
    torch.testing.assert_close(first[1], whole.entropy, atol=3e-6, rtol=0)
    torch.testing.assert_close(torch.cat([first[2], second[2]], dim=1), logits.grad, atol=3e-6, rtol=0)
