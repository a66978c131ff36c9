"""The oracle of ``logprob.py``: the same quantities by the shortest plain torch, over the whole vocabulary at once.

T tokens, V vocabulary columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def logprob_entropy_reference(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    valid_vocab: int | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of the label, entropy, log-sum-exp), each float64 [T] and differentiable by autograd.

    Rows whose label is ``ignore_index`` give 0. Columns from ``valid_vocab`` on have no probability.
    """
    logits_TV = logits_TV[:, :valid_vocab].double()
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[:, None]
    logprobs_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    active_T = labels_T != ignore_index
    label_T = torch.where(active_T, labels_T, 0)
    logprob_T = logprobs_TV.gather(-1, label_T[:, None])[:, 0]
    entropy_T = torch.special.entr(logprobs_TV.exp()).sum(-1)
    lse_T = torch.logsumexp(logits_TV / temperature, dim=-1)
    zero = logprob_T.new_zeros(())
    return tuple(torch.where(active_T, value_T, zero) for value_T in (logprob_T, entropy_T, lse_T))  # type: ignore[return-value]
