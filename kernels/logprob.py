"""Log-probability of the labels and entropy of the distribution, from logits split over the vocabulary.

With z the logits over the temperature, m their maximum and s = sum exp(z - m):

    logprob  = (z_label - m) - log s
    entropy  = log s - u / s,   u = sum exp(z - m) (z - m)

Each tensor-parallel rank reduces its own columns to (m, s, u, z_label), one all-gather exchanges these four numbers per
token, and every rank merges them in rank order, so all ranks hold bit-identical results. Backward needs no
communication:

    d logprob / d z_j = [j is the label] - p_j
    d entropy / d z_j = -p_j (log p_j + entropy),   log p_j = (z_j - m) - log s

Only the logits, m, log s and the entropy are kept for backward; p is computed again, in chunks of rows. m and log s are
kept apart because their sum loses digits when logits are large. Arithmetic is fp32, or float64 for float64 logits.

    T tokens, V columns of this rank, C rows of a chunk
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Entropy = Literal["none", "metric", "grad"]
_CHUNK_ELEMENTS = 1 << 22
"""Elements of one chunk's scratch tensors: 16 MiB each in fp32."""


@dataclass(frozen=True, slots=True)
class LogprobOut:
    """All [T]: fp32, or float64 for float64 logits. Rows whose label is ignored hold 0."""

    logprob: Tensor
    entropy: Tensor | None
    lse: Tensor
    """log sum exp of the logits over the temperature; no gradient."""


def logprob_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: Entropy = "none",
    valid_vocab: int | None = None,
    vocab_start: int = 0,
    tp_group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
    chunk_rows: int | None = None,
) -> LogprobOut:
    """Natural-log probability of each label and, when asked for, the entropy of its distribution.

    Args:
        logits: [T, V], this rank's columns, any float dtype; -inf excludes a column.
        labels: [T] global vocabulary ids.
        temperature: one number, or [T]; must be > 0.
        entropy: ``none``, ``metric`` (a value without gradient) or ``grad``.
        valid_vocab: global size of the real vocabulary; columns from it on are padding without probability.
        vocab_start: global id of this rank's first column.
        tp_group: the ranks that hold the other columns; None when this rank has all.
        ignore_index: a label that takes its row out: results 0, gradient 0, whatever its logits are.
        chunk_rows: rows reduced at once; default keeps a scratch tensor at 16 MiB.

    Gradients go to the logits only, in their dtype. A row whose incoming gradient is 0 gets exactly 0, even if its
    logits are not finite.

    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(f"logits must be [T, V] and labels [T], got {tuple(logits.shape)} and {tuple(labels.shape)}")
    if not isinstance(temperature, Tensor):
        if temperature <= 0:
            raise ValueError(f"temperature ({temperature}) must be > 0; use 1.0 for the model's own distribution")
        temperature = torch.tensor(temperature)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    temperature_T = temperature.to(device=logits.device, dtype=dtype).expand(labels.shape)
    columns = _Columns(vocab_start, valid_vocab, ignore_index, chunk_rows or _default_rows(logits.shape[1]))
    logprob, entropy_T, lse = _LogprobEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, temperature_T, columns, tp_group, entropy
    )
    return LogprobOut(logprob, None if entropy == "none" else entropy_T, lse)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where this rank's columns lie in the vocabulary, and how many rows are worked on at once."""

    start: int
    valid: int | None
    ignore_index: int
    rows: int

    def num_valid(self, width: int) -> int:
        """How many of this rank's ``width`` columns are no padding."""
        return width if self.valid is None else min(max(self.valid - self.start, 0), width)


def _default_rows(width: int) -> int:
    return max(1, _CHUNK_ELEMENTS // max(1, width))


def _chunks(num_rows: int, columns: _Columns) -> Iterator[slice]:
    for start in range(0, num_rows, columns.rows):
        yield slice(start, min(start + columns.rows, num_rows))


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        temperature_T: Tensor,
        columns: _Columns,
        tp_group: dist.ProcessGroup | None,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts_4T = temperature_T.new_empty(4, len(labels_T))
        for rows in _chunks(len(labels_T), columns):
            parts_4T[:, rows] = _reduce_columns(logits_TV[rows], labels_T[rows], temperature_T[rows], columns)
        m_T, s_T, u_T, label_T = _merge_ranks(_all_gather(parts_4T, tp_group))
        log_s_T = s_T.log()
        active_T = labels_T != columns.ignore_index
        zero = m_T.new_zeros(())
        logprob_T = torch.where(active_T, label_T - m_T - log_s_T, zero)
        entropy_T = torch.where(active_T, log_s_T - u_T / s_T, zero)
        lse_T = torch.where(active_T, m_T + log_s_T, zero)
        ctx.save_for_backward(logits_TV, labels_T, temperature_T, m_T, log_s_T, entropy_T)
        ctx.columns = columns
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*((lse_T,) if entropy == "grad" else (entropy_T, lse_T)))
        return logprob_T, entropy_T, lse_T

    @staticmethod
    def backward(ctx: Any, *grads_T: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprob_T, grad_entropy_T, _ = grads_T
        if grad_logprob_T is None and grad_entropy_T is None:
            return (None,) * 6
        logits_TV, labels_T, temperature_T, m_T, log_s_T, entropy_T = ctx.saved_tensors
        columns: _Columns = ctx.columns
        dlogits_TV = torch.empty_like(logits_TV)
        for rows in _chunks(len(labels_T), columns):
            dlogits_TV[rows] = _chunk_gradient(
                _scaled(logits_TV[rows], temperature_T[rows], columns) - m_T[rows, None] - log_s_T[rows, None],
                labels_T[rows],
                entropy_T[rows],
                None if grad_logprob_T is None else grad_logprob_T[rows] / temperature_T[rows],
                None if grad_entropy_T is None else grad_entropy_T[rows] / temperature_T[rows],
                columns,
            )
        return dlogits_TV, None, None, None, None, None


def _scaled(logits_CV: Tensor, temperature_C: Tensor, columns: _Columns) -> Tensor:
    """Logits over temperature in the arithmetic's dtype, padding columns at -inf; a new tensor."""
    z_CV = logits_CV.to(temperature_C.dtype) / temperature_C[:, None]
    z_CV[:, columns.num_valid(z_CV.shape[1]) :] = -torch.inf
    return z_CV


def _local_labels(labels_C: Tensor, width: int, columns: _Columns) -> tuple[Tensor, Tensor]:
    """(column of each label here, whether this rank has it); the column is 0 where it has not."""
    local_C = labels_C - columns.start
    here_C = (local_C >= 0) & (local_C < width) & (labels_C != columns.ignore_index)
    return torch.where(here_C, local_C, 0), here_C


def _reduce_columns(logits_CV: Tensor, labels_C: Tensor, temperature_C: Tensor, columns: _Columns) -> Tensor:
    """[4, C]: m, s, u and the label's z (0 where another rank has it) over this rank's columns."""
    z_CV = _scaled(logits_CV, temperature_C, columns)
    local_C, here_C = _local_labels(labels_C, z_CV.shape[1], columns)
    label_C = torch.where(here_C, z_CV.gather(-1, local_C[:, None])[:, 0], z_CV.new_zeros(()))
    m_C = z_CV.amax(-1)
    z_CV -= torch.where(m_C == -torch.inf, 0.0, m_C)[:, None]  # all columns excluded: every exp below is 0
    e_CV = z_CV.exp()
    s_C = e_CV.sum(-1)
    u_C = torch.where(e_CV == 0, e_CV, e_CV * z_CV).sum(-1)  # 0 x -inf has no part in the entropy
    return torch.stack((m_C, s_C, u_C, label_C))


def _all_gather(parts_4T: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The parts of all ranks, [ranks, 4, T]."""
    if group is None or dist.get_world_size(group) == 1:
        return parts_4T[None]
    gathered = [torch.empty_like(parts_4T) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, parts_4T, group=group)
    return torch.stack(gathered)


def _merge_ranks(parts_R4T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """m, s, u and the label's z over the whole vocabulary, each [T], added up in rank order."""
    m_RT, s_RT, u_RT, label_RT = parts_R4T.unbind(1)
    m_T = m_RT.amax(0)
    shift_RT = m_RT - m_T
    shift_RT = torch.where(m_RT == -torch.inf, 0.0, shift_RT)  # a rank without columns has s = u = 0
    scale_RT = shift_RT.exp()
    return m_T, (s_RT * scale_RT).sum(0), ((u_RT + shift_RT * s_RT) * scale_RT).sum(0), label_RT.sum(0)


def _chunk_gradient(
    logp_CV: Tensor,
    labels_C: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor | None,
    grad_entropy_C: Tensor | None,
    columns: _Columns,
) -> Tensor:
    """Gradient of one chunk's logits, [C, V]. Rows that are ignored or receive no gradient are exactly 0."""
    p_CV = logp_CV.exp()
    grad_CV = torch.zeros_like(p_CV)
    active_C = torch.zeros_like(labels_C, dtype=torch.bool)
    if grad_logprob_C is not None:
        local_C, here_C = _local_labels(labels_C, p_CV.shape[1], columns)
        grad_CV -= grad_logprob_C[:, None] * p_CV
        grad_CV.scatter_add_(-1, local_C[:, None], torch.where(here_C, grad_logprob_C, 0.0)[:, None])
        active_C |= grad_logprob_C != 0
    if grad_entropy_C is not None:
        term_CV = torch.where(p_CV == 0, p_CV, p_CV * (logp_CV + entropy_C[:, None]))
        grad_CV -= grad_entropy_C[:, None] * term_CV
        active_C |= grad_entropy_C != 0
    active_C &= labels_C != columns.ignore_index
    return torch.where(active_C[:, None], grad_CV, 0.0)
