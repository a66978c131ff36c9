from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megarl.algorithms.losses import clipped_surrogate, kl_penalty, policy_loss, supervised_loss, truncated_importance
from megarl.config import AlgorithmConfig


@dataclass(frozen=True)
class Batch:
    loss_weights: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None


def _batch(size: int = 6, seed: int = 0, *, old: bool = True, ref: bool = True) -> tuple[Tensor, Tensor, Batch]:
    """Log-probabilities, entropies and a batch whose last two positions carry no loss; float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64) * 0.3

    weights = draw().abs() + 0.1
    weights[-2:] = 0
    logprobs, entropy = draw() - 1, draw() + 2
    batch = Batch(weights, draw(), draw() - 1, draw() - 1 if old else None, draw() - 1 if ref else None)
    return logprobs, entropy, batch


def _config(**changes: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(changes)


def test_clipping_takes_the_worse_of_the_two_with_separate_bounds() -> None:
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    expected = torch.tensor([-1.28, -0.5, 1.5, 0.8])
    torch.testing.assert_close(clipped_surrogate(ratio, advantages, 0.2, 0.28), expected)


def test_importance_is_capped_above_only_and_has_no_gradient() -> None:
    old = torch.tensor([0.0, 1.0, -1.0]).requires_grad_()
    importance = truncated_importance(old, torch.zeros(3), cap=2.0)
    torch.testing.assert_close(importance, torch.tensor([1.0, 2.0, math.exp(-1)]))
    assert not importance.requires_grad


def test_kl_estimators_by_hand() -> None:
    new, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    k3 = math.exp(-0.5) - 1 + 0.5
    ratio = torch.tensor([1.2])
    assert kl_penalty(new, ref, ratio, "k2").item() == pytest.approx(0.125)
    assert kl_penalty(new, ref, ratio, "k3").item() == pytest.approx(k3)
    assert kl_penalty(new, ref, ratio, "k3_unbiased").item() == pytest.approx(1.2 * k3)


@pytest.mark.parametrize("estimator", ["k2", "k3_unbiased"])
def test_expected_gradient_of_the_kl_estimator_is_that_of_the_kl(estimator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    ratio = (logp - logp.detach()).exp()
    expected_value = (logp.detach().exp() * kl_penalty(logp, ref, ratio, estimator)).sum()
    (estimated,) = torch.autograd.grad(expected_value, logits)
    torch.testing.assert_close(estimated, exact)


def test_on_policy_loss_by_hand() -> None:
    """Ratio and importance are 1: the loss is minus the weighted advantages, its gradient too."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0]).requires_grad_()
    batch = Batch(torch.tensor([0.5, 0.25, 0.0]), torch.tensor([2.0, -1.0, 9.0]), torch.tensor([-1.0, -2.0, 0.0]))
    loss, sums = policy_loss(logprobs, None, batch, _config())
    loss.backward()
    assert loss.item() == -0.75
    assert torch.equal(logprobs.grad, torch.tensor([-1.0, 0.25, 0.0]))
    assert sums["ratio"] == (2.0, 2.0)
    assert sums["mismatch_kl"] == (0.0, 2.0)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbiased"])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_passes_finite_differences(estimator: str, seed: int) -> None:
    logprobs, entropy, batch = _batch(seed=seed)
    config = _config(kl={"coef": 0.3, "estimator": estimator}, entropy_coef=0.1)
    inputs = (logprobs.requires_grad_(), entropy.requires_grad_())
    assert torch.autograd.gradcheck(lambda new, h: policy_loss(new, h, batch, config)[0], inputs)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_nothing_at_a_masked_position_reaches_loss_gradient_or_metric(poison: float) -> None:
    config = _config(kl={"coef": 0.3}, entropy_coef=0.1)
    logprobs, entropy, batch = _batch()

    def run(value: float | None) -> tuple[Tensor, Tensor, Tensor, dict[str, tuple[float, float]]]:
        def poisoned(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            if value is not None:
                tensor[-2:] = value
            return tensor

        new, h = poisoned(logprobs).requires_grad_(), poisoned(entropy).requires_grad_()
        names = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs")
        dirty = replace(batch, **{name: poisoned(getattr(batch, name)) for name in names})
        loss, sums = policy_loss(new, h, dirty, config)
        loss.backward()
        return loss.detach(), new.grad, h.grad, sums

    clean, dirty = run(None), run(poison)
    assert all(torch.equal(a, b) for a, b in zip(clean[:3], dirty[:3], strict=True))
    assert clean[3] == dirty[3]


def test_a_micro_batch_of_padding_is_worth_nothing_even_with_a_kl_penalty() -> None:
    zeros = torch.zeros(4)
    loss, sums = policy_loss(
        zeros.clone().requires_grad_(), zeros, Batch(zeros, zeros, zeros), _config(kl={"coef": 0.1})
    )
    loss.backward()
    assert loss.item() == 0
    assert all(pair == (0.0, 0.0) for pair in sums.values())


def test_a_stray_log_ratio_stays_finite() -> None:
    new = torch.tensor([0.0]).requires_grad_()
    batch = Batch(torch.ones(1), -torch.ones(1), torch.tensor([-500.0]), old_logprobs=torch.tensor([-500.0]))
    loss, sums = policy_loss(new, None, batch, _config())
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(new.grad).all()
    assert all(math.isfinite(value) for value, _ in sums.values())


def test_clip_fractions_count_only_where_the_bound_acts() -> None:
    old = torch.zeros(4)
    new = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    batch = Batch(torch.ones(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), old, old_logprobs=old)
    _, sums = policy_loss(new, None, batch, _config())
    assert sums["clip_high_share"] == (1.0, 4.0)
    assert sums["clip_low_share"] == (1.0, 4.0)


def test_mismatch_kl_compares_the_policy_before_the_update_with_the_engine() -> None:
    batch = Batch(torch.ones(1), torch.ones(1), torch.tensor([-1.0]), old_logprobs=torch.tensor([-1.5]))
    _, sums = policy_loss(torch.tensor([-3.0]), None, batch, _config())
    assert sums["mismatch_kl"][0] == pytest.approx(math.exp(-0.5) - 0.5)


def test_supervised_loss_is_the_weighted_cross_entropy() -> None:
    logprobs = torch.tensor([-1.0, -3.0, math.nan]).requires_grad_()
    zeros = torch.zeros(3)
    loss, sums = supervised_loss(logprobs, Batch(torch.tensor([0.5, 0.5, 0.0]), zeros, zeros))
    loss.backward()
    assert loss.item() == 2.0
    assert sums["nll"] == (4.0, 2.0)
    assert torch.equal(logprobs.grad, torch.tensor([-0.5, -0.5, 0.0]))
