"""The policy loss and the supervised loss of one micro-batch.

A loss is ``sum(loss_weights * token_loss)``: every denominator is already in the weights (``data/packing.py``), so
losses and gradients add up over micro-batches and ranks. Positions of weight 0 are selected out before any arithmetic:
whatever stands there, it reaches neither loss nor gradient nor metric.

Metrics are (sum, weight) pairs of Python floats, to be added over micro-batches and ranks; the metric is sum / weight,
and a weight of 0 marks a plain sum.

    T positions of the micro-batch; position t speaks of ``labels[t]``
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megarl.config import AlgorithmConfig

Sums = dict[str, tuple[float, float]]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are held within +-20, so that exp of a stray one stays finite; the gradient ends there."""


class LossTensors(Protocol):
    """The per-token tensors of a micro-batch, each [T]; see ``types.MicroBatch``."""

    @property
    def loss_weights(self) -> Tensor: ...  # noqa: D102
    @property
    def advantages(self) -> Tensor: ...  # noqa: D102
    @property
    def rollout_logprobs(self) -> Tensor: ...  # noqa: D102
    @property
    def old_logprobs(self) -> Tensor | None: ...  # noqa: D102
    @property
    def ref_logprobs(self) -> Tensor | None: ...  # noqa: D102


def policy_loss(
    logprobs: Tensor, entropy: Tensor | None, batch: LossTensors, config: AlgorithmConfig
) -> tuple[Tensor, Sums]:
    """Clipped policy gradient with truncated importance sampling, KL penalty and entropy bonus.

        token_loss = importance * (clipped_surrogate + kl.coef * kl) - entropy_coef * entropy

    ``importance`` repairs that the engine sampled, not the trainer; both terms it multiplies are expectations over
    sampled tokens. Without ``old_logprobs`` the current ones, detached, are the old ones and the ratio is exactly 1.

    Args:
        logprobs: [T] of the labels, with gradient.
        entropy: [T]; needed with gradient when ``entropy_coef`` is not 0, otherwise a metric or None.
        batch: what the loss needs of the micro-batch.
        config: clip bounds, coefficients and estimators.

    Returns:
        The scalar loss, and metrics as (sum, weight).
    """
    mask = batch.loss_weights != 0
    new = _select(mask, logprobs)
    rollout = _select(mask, batch.rollout_logprobs)
    old = new.detach() if batch.old_logprobs is None else _select(mask, batch.old_logprobs)
    advantages = _select(mask, batch.advantages)
    ratio = _ratio(new, old)
    importance = truncated_importance(old, rollout, config.importance_cap)
    token_loss = importance * clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high)
    sums = _policy_metrics(mask, new.detach(), old, rollout, advantages, importance, config)
    if config.kl.coef and mask.any():  # a micro-batch of padding was never scored
        assert batch.ref_logprobs is not None, "algorithm.kl.coef > 0 needs ref_logprobs; prepare() scores them"
        kl = kl_penalty(new, _select(mask, batch.ref_logprobs), ratio, config.kl.estimator)
        token_loss = token_loss + config.kl.coef * importance * kl
        sums["kl_to_ref"] = _mean(mask, kl)
    if entropy is not None:
        selected = _select(mask, entropy)
        token_loss = token_loss - config.entropy_coef * selected if config.entropy_coef else token_loss
        sums["entropy"] = _mean(mask, selected)
    loss = (_select(mask, batch.loss_weights) * _select(mask, token_loss)).sum()
    return loss, sums | {"loss": (float(loss.detach()), 0.0)}


def supervised_loss(logprobs: Tensor, batch: LossTensors) -> tuple[Tensor, Sums]:
    """Cross-entropy of the labels that carry weight; metrics as in ``policy_loss``."""
    mask = batch.loss_weights != 0
    nll = -_select(mask, logprobs)
    loss = (_select(mask, batch.loss_weights) * nll).sum()
    return loss, {
        "loss": (float(loss.detach()), 0.0),
        "nll": _mean(mask, nll),
    }


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) per token.

    PPO, Schulman et al. 2017 (arXiv:1707.06347), equation 7; separate bounds: DAPO, Yu et al. 2025 (arXiv:2503.14476).
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def truncated_importance(old: Tensor, rollout: Tensor, cap: float) -> Tensor:
    """min(pi_trainer / pi_engine, cap) per token, without gradient.

    Truncated importance sampling, Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training". 1 where trainer and engine agree.
    """
    return _ratio(old, rollout).detach().clamp(max=cap)


def kl_penalty(new: Tensor, ref: Tensor, ratio: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) per token, from one sampled token each. d = log pi_ref - log pi.

    k2 = d^2 / 2 and k3 = exp(d) - 1 - d: Schulman 2020, "Approximating KL divergence". The gradient of k2 is that of
    the KL, the gradient of k3 is not; ``k3_unbiased`` multiplies k3 by the differentiable ratio to the old policy; its
    expected gradient is exact: DeepSeek-V3.2 (arXiv:2512.02556), section 3.1.
    """
    if estimator == "k2":
        return (ref - new) ** 2 / 2
    if estimator == "k3":
        return _k3(ref - new)
    assert estimator == "k3_unbiased", estimator
    return ratio * _k3(ref - new)


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(d) - d


def _ratio(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _select(mask: Tensor, values: Tensor) -> Tensor:
    """``values`` where ``mask``, else 0; NaN and infinity elsewhere do not get through, nor do their gradients."""
    return torch.where(mask, values, values.new_zeros(()))


def _mean(mask: Tensor, values: Tensor) -> tuple[float, float]:
    """The (sum, weight) pair of a mean over loss tokens."""
    return float(_select(mask, values.detach()).double().sum()), float(mask.sum())


def _policy_metrics(
    mask: Tensor,
    new: Tensor,
    old: Tensor,
    rollout: Tensor,
    advantages: Tensor,
    importance: Tensor,
    config: AlgorithmConfig,
) -> Sums:
    ratio = _ratio(new, old)
    return {
        "mismatch_kl": _mean(mask, _k3(old - rollout)),
        "mismatch_abs_diff": _mean(mask, (old - rollout).abs()),
        "kl_to_old": _mean(mask, _k3(new - old)),
        "ratio": _mean(mask, ratio),
        "clip_low_share": _mean(mask, ((ratio < 1.0 - config.clip_low) & (advantages < 0)).float()),
        "clip_high_share": _mean(mask, ((ratio > 1.0 + config.clip_high) & (advantages > 0)).float()),
        "importance": _mean(mask, importance),
        "importance_capped_share": _mean(mask, (importance >= config.importance_cap).float()),
    }
