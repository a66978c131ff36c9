"""What Megatron-Core needs on a machine without CUDA.

Megatron names CUDA in its own code: streams, events, ``device="cuda"``, CUDA RNG states and the type strings
``torch.cuda.FloatTensor``. ``prepare()`` stands in for these with inert or CPU counterparts, in this process, before
Megatron is imported. It does nothing where CUDA is present, so the same trainer code runs on both.

Nothing here changes a number: streams order work that is synchronous on a CPU anyway, and the RNG states are
the CPU generator's. The Adam of ``optimizer.py`` belongs to the same story: the distributed optimizer's checkpoint
expects the step count where Transformer Engine's and apex's keep it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "empty_like",
    "as_tensor",
)
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_prepared = False


class _Event:
    """A CUDA event where everything is already done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """A CUDA stream where everything runs in program order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def prepare() -> None:
    """Stand in for CUDA in this process. Idempotent; does nothing where CUDA is present."""
    global _prepared  # one process, one torch
    if _prepared or torch.cuda.is_available():
        return
    torch.compile = _eager  # type: ignore[assignment]
    _stand_in_for_streams()
    _send_cuda_tensors_to_cpu()
    _patch_megatron()
    _prepared = True


def _eager(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Megatron compiles its small fused functions at import; on a CPU that costs more than it saves."""
    return function if function is not None else _eager


def _stand_in_for_streams() -> None:
    stream = _Stream()
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.Event = _Event  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.default_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: nullcontext()  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.Tensor.record_stream = lambda self, *_: None  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _send_cuda_tensors_to_cpu() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        return original_to(self, *args, **kwargs)

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        return _CUDA_TYPE_NAMES.get(self.dtype) or original_type(self)

    torch.Tensor.to = to  # type: ignore[assignment,method-assign]
    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.transformer.multi_latent_attention as multi_latent_attention

    def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def splits_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    megatron_random._get_cuda_rng_state = get_rng_state
    megatron_random._set_cuda_rng_state = set_rng_state
    torch.cuda.get_rng_state = get_rng_state
    torch.cuda.set_rng_state = set_rng_state  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False  # it has imported a mock
    token_dispatcher.maybe_move_tensor_to_cpu = splits_to_cpu
    moe_utils.maybe_move_tensor_to_cpu = splits_to_cpu
    mappings._gather_along_first_dim = _gathering_uneven_parts(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _scattering_uneven_parts(mappings._reduce_scatter_along_first_dim)


def _gathering_uneven_parts(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gloo gathers only parts of one size; experts cut over tensor-parallel ranks (ETP > 1) see different tokens."""

    def gather_padded(x: torch.Tensor, group: Any, output_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, output_split_sizes, *rest)
        longest = max(output_split_sizes)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gather_padded


def _scattering_uneven_parts(reduce_scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The way back: every rank gets the sum of its own part."""

    def sum_and_take(x: torch.Tensor, group: Any, input_split_sizes: Any = None, *rest: Any) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(x, group, input_split_sizes, *rest)
        total = x.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        own: torch.Tensor = torch.split(total, input_split_sizes)[group.rank()]
        return own.contiguous()

    return sum_and_take
