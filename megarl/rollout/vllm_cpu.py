"""What vLLM 0.32 needs on a machine without a GPU to compute the right thing. ``prepare`` comes before any engine.

- Rotary embeddings of latent attention (DeepSeek): the C++ kernel misreads a key that is a slice of a wider tensor and
  rotates pairs wrongly; log-probabilities are off by more than 1. vLLM's own PyTorch version is right, and is used for
  every model that rotates neighbouring dimensions.
- Expert parallelism: the kernel takes expert ids for places among the rank's own experts and reads past them (a
  segmentation fault). Ids are turned into places here, and experts of other ranks get weight 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_prepared = False


def prepare() -> None:
    """Mend vLLM in this process. Idempotent; does nothing where vLLM runs on something else than a CPU."""
    from vllm.platforms import current_platform

    global _prepared  # one process, one vLLM
    if _prepared or not current_platform.is_cpu():
        return
    _rotate_pairs_in_pytorch()
    _find_own_experts()
    _prepared = True


def _rotate_pairs_in_pytorch() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    in_cpp = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        rotate = in_cpp if self.is_neox_style else type(self).forward_native
        return rotate(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


def _find_own_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply_own = CPUUnquantizedExperts.apply

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs |= zip(_APPLY_ARGUMENTS, args, strict=False)
        if kwargs["expert_map"] is not None:
            places = kwargs["expert_map"][kwargs["topk_ids"].long()]
            is_own = places >= 0
            kwargs["topk_ids"] = torch.where(is_own, places, 0).to(kwargs["topk_ids"].dtype).contiguous()
            kwargs["topk_weights"] = torch.where(is_own, kwargs["topk_weights"], 0.0).contiguous()
        apply_own(self, **kwargs)

    CPUUnquantizedExperts.apply = apply


_APPLY_ARGUMENTS = (
    "output",
    "hidden_states",
    "w1",
    "w2",
    "topk_weights",
    "topk_ids",
    "activation",
    "global_num_experts",
    "expert_map",
    "a1q_scale",
    "a2_scale",
    "workspace13",
    "workspace2",
    "expert_tokens_meta",
    "apply_router_weight_on_input",
)
"""Of ``CPUUnquantizedExperts.apply``, in order."""
