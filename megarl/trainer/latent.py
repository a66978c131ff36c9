"""Multi-head latent attention for Megatron's local layer spec, with right gradients under tensor parallelism.

Megatron's local spec cuts the projections down to the low ranks over tensor-parallel ranks and gathers their outputs.
The rotated part of the key is then used by every rank for its own heads, and the gather's backward hands on each
rank's part of that gradient without summing it (Megatron-Core 0.16.1: the loss is right, the gradients of
everything below are not). Transformer Engine's spec keeps these projections whole on every rank and is right, so the
local spec does the same here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor


class WholeLinear(torch.nn.Module):
    """``x @ weight.T`` on this rank's part of the sequence, the same whole weight on every tensor-parallel rank."""

    def __init__(self, in_size: int, out_size: int, config: MLATransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(out_size, in_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """(output, no bias), as Megatron's linear layers return it."""
        return F.linear(x, self.weight), None


class LatentSelfAttention(MLASelfAttention):
    """``MLASelfAttention`` whose projections down to the low ranks are whole on every rank."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        kv_size = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, kv_size, config)
