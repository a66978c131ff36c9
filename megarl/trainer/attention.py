"""Core attention over packed sequences for Megatron's local layer spec.

Megatron's local attention takes no packed (THD) input. Segments of similar length are laid side by side in one
padded block and attended with one call. Padding stands after the tokens, so a causal mask alone keeps real tokens from
ever seeing it.

    T tokens of all segments, B segments of one block, S its padded length, N heads, G key heads, D head size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


@dataclass
class PackedSegments(PackedSeqParams):
    """Megatron's packed-sequence parameters, with the blocks in which attention works."""

    blocks: tuple[Tensor, ...] = ()
    """index_BS into T of every block; padded entries are 0."""
    restore_T: Tensor | None = None
    """Where token t stands in the blocks, flattened and joined."""


def pack_segments(cu_seqlens: np.ndarray, device: torch.device) -> PackedSegments:
    """Parameters for segments ``[cu_seqlens[i], cu_seqlens[i + 1])``."""
    starts, lengths = cu_seqlens[:-1], np.diff(cu_seqlens)
    blocks, restore_T = _blocks(starts, lengths)
    bounds = torch.as_tensor(cu_seqlens, dtype=torch.int32, device=device)
    longest = int(lengths.max())
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=tuple(torch.as_tensor(index_BS, device=device) for index_BS in blocks),
        restore_T=torch.as_tensor(restore_T, device=device),
    )


def _blocks(starts: np.ndarray, lengths: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Segments grouped by length, rounded up to one of four steps per power of two (padding below 25 %)."""
    rounded = np.array([_round_up(int(length)) for length in lengths])
    restore_T = np.empty(int(lengths.sum()), dtype=np.int64)
    blocks, offset = [], 0
    for size in np.unique(rounded):
        members = np.flatnonzero(rounded == size)
        place_S = np.arange(int(lengths[members].max()))
        mask_BS = place_S[None, :] < lengths[members][:, None]
        index_BS = np.where(mask_BS, starts[members][:, None] + place_S[None, :], 0)
        restore_T[index_BS[mask_BS]] = offset + np.flatnonzero(mask_BS)
        offset += index_BS.size
        blocks.append(index_BS)
    return blocks, restore_T


def _round_up(length: int) -> int:
    if length <= 8:
        return 8
    step = 1 << max((length - 1).bit_length() - 3, 0)
    return -(-length // step) * step


class PackedAttention(torch.nn.Module):
    """Causal attention within each segment, by ``scaled_dot_product_attention``."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query_TND: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> Tensor:
        """Attended values, [T, N * D]."""
        assert packed_seq_params is not None, "megarl always packs; attention was called without segments"
        num_heads, num_key_heads = query_TND.shape[1], key_TGD.shape[1]
        key_TND = key_TGD.repeat_interleave(num_heads // num_key_heads, dim=1)
        value_TND = value_TGD.repeat_interleave(num_heads // num_key_heads, dim=1)
        parts = []
        for index_BS in packed_seq_params.blocks:
            query, key, value = (_take(x, index_BS) for x in (query_TND, key_TND, value_TND))
            out_BNSD = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
            parts.append(out_BNSD.transpose(1, 2).flatten(2).flatten(0, 1))
        assert packed_seq_params.restore_T is not None
        return torch.cat(parts).index_select(0, packed_seq_params.restore_T)


def _take(x_TND: Tensor, index_BS: Tensor) -> Tensor:
    """[B, N, S, D] rows of ``x_TND``."""
    rows = x_TND.index_select(0, index_BS.flatten())
    return rows.view(*index_BS.shape, *x_TND.shape[1:]).transpose(1, 2)
