"""RMSNorm for Megatron's local layer spec."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

try:
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine
except ImportError:
    fused_rms_norm_affine = None


class RMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang & Sennrich 2019, arXiv:1910.07467), statistics in fp32.

    Megatron's own wrapper refuses sequence parallelism. Here the weight carries ``sequence_parallel``, so that Megatron
    sums its gradient over the tensor-parallel ranks, each of which saw other tokens. On GPUs apex's fused kernel
    is used where it is installed.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalised over the last axis, in the dtype of ``x``."""
        if fused_rms_norm_affine is not None and x.is_cuda:
            return fused_rms_norm_affine(x, self.weight, self.weight.shape, self.eps)  # type: ignore[no-any-return]
        return torch.nn.functional.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight
