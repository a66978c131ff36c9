"""One pass over micro-batches through Megatron's pipeline schedules.

T tokens of a micro-batch, V/tp vocabulary columns of this rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.trainer.attention import PackedSegments, pack_segments
from megarl.types import MicroBatch
from megarl_kernels.logprob import LogprobOut, logprob_entropy

Loss = Callable[[Tensor, "DeviceBatch"], tuple[Tensor, Any]]
"""From logits_TV (this rank's vocabulary columns) and the micro-batch to (scalar loss, what to report)."""


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A MicroBatch as tensors on this rank's device; same fields, same shift."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    segments: PackedSegments
    loss_weights: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None

    @classmethod
    def of(cls, batch: MicroBatch, device: torch.device) -> DeviceBatch:
        """Copy ``batch`` to ``device``."""

        def float_T(array: Any) -> Tensor:
            return torch.tensor(array, dtype=torch.float32, device=device)

        return cls(
            tokens=torch.tensor(batch.tokens, dtype=torch.int64, device=device),
            positions=torch.tensor(batch.positions, dtype=torch.int64, device=device),
            labels=torch.tensor(batch.labels, dtype=torch.int64, device=device),
            segments=pack_segments(batch.cu_seqlens, device),
            loss_weights=float_T(batch.loss_weights),
            advantages=float_T(batch.advantages),
            rollout_logprobs=float_T(batch.rollout_logprobs),
            old_logprobs=None if batch.old_logprobs is None else float_T(batch.old_logprobs),
            ref_logprobs=None if batch.ref_logprobs is None else float_T(batch.ref_logprobs),
        )


@dataclass(frozen=True, slots=True)
class LogprobSettings:
    """What log-probabilities depend on besides the weights."""

    temperature: float
    valid_vocab: int
    """Columns from here on are padding and have no probability."""
    entropy_in_loss: bool = False


def token_logprobs(logits_TV: Tensor, batch: DeviceBatch, settings: LogprobSettings) -> LogprobOut:
    """Log-probability and entropy of every label over the tensor-parallel vocabulary, fp32 [T]."""
    return logprob_entropy(
        logits_TV,
        batch.labels,
        temperature=settings.temperature,
        entropy="grad" if settings.entropy_in_loss else "metric",
        valid_vocab=settings.valid_vocab,
        vocab_start=logits_TV.shape[-1] * parallel_state.get_tensor_model_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )


def run_micro_batches(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    device: torch.device,
    *,
    forward_only: bool,
) -> list[Any]:
    """What ``loss`` reports for every micro-batch, in order; on the last pipeline stage only, else empty.

    With ``forward_only`` false the gradients are left summed over micro-batches and data-parallel ranks, unscaled:
    the loss weights carry every denominator.
    """
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss=loss, device=device),
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=max(len(batch.tokens) for batch in micro_batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return reports


def _forward_step(
    batches: Iterator[MicroBatch], model: torch.nn.Module, *, loss: Loss, device: torch.device
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Any]]]:
    batch = DeviceBatch.of(next(batches), device)
    output = model(
        input_ids=batch.tokens[None],
        position_ids=batch.positions[None],
        attention_mask=None,
        packed_seq_params=batch.segments,
    )

    def loss_of(logits_1TV: Tensor) -> tuple[Tensor, Tensor, Any]:
        value, report = loss(logits_1TV[0], batch)
        return value, torch.zeros((), dtype=torch.int), report

    return output, loss_of
