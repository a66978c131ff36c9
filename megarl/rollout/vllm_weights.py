"""Putting new weights into a live vLLM model, and taking them out again.

vLLM keeps weights in the form its kernels want, made once after loading: on CPU every linear layer's weight moves into
a packed oneDNN handler (``layer.cpu_linear``) and leaves an empty parameter behind, and expert weights are prepacked in
place. So writing into the live parameters does nothing for linear layers and corrupts experts, and vLLM's own
reloading misses tied heads and prepacks experts over prepacked ones (both silently). Here every module gets its whole
shard in the layout a checkpoint loader would have left, as a new parameter, and the module's own
``process_weights_after_loading`` packs it, exactly as at start-up:

    linear, embedding, head   quant_method.process_weights_after_loading(module)
    experts                   quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
    tied head                 pointed at the new embedding parameter, then as a linear layer
    norms                     nothing to pack

The old parameters and handlers are only put aside, so undoing an install gives the old numbers bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

DERIVED_BUFFERS = frozenset(
    {"cos_sin_cache", "_k_scale", "_v_scale", "_q_scale", "_prob_scale", "_expert_map", "expert_mask"}
)
"""Buffers that vLLM computes from the config. Any other buffer is state, and a plan that leaves it out is refused."""

_PACKED_HANDLER = "cpu_linear"
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_PROBE_TOKENS = 4


class WeightMismatch(ValueError):
    """The staged weights are not the weights of this model, or are not what it computes with."""


@dataclass(frozen=True, slots=True)
class _Before:
    """What one module held before an install."""

    module: nn.Module
    parameters: dict[str, nn.Parameter | None]
    handler: Any

    @classmethod
    def of(cls, module: nn.Module) -> _Before:
        return cls(module, dict(module._parameters), module.__dict__.get(_PACKED_HANDLER))

    def restore(self) -> None:
        """Put it back."""
        self.module._parameters.update(self.parameters)
        if self.handler is not None:
            self.module.__dict__[_PACKED_HANDLER] = self.handler


@dataclass(frozen=True, slots=True)
class Undo:
    """Takes one install back."""

    befores: tuple[_Before, ...]

    def __call__(self) -> None:
        """Put everything back, newest first."""
        for before in reversed(self.befores):
            before.restore()


class LiveModel:
    """The weights of one engine rank.

    ``model`` is the module vLLM runs; ``loaded_shapes`` are its parameters' shapes before they were packed.
    """

    def __init__(self, model: nn.Module, loaded_shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._modules = dict(model.named_modules())
        self._shapes = dict(loaded_shapes)
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._tied = dict(_tied_parameters(model))
        self._state_buffers = {
            name for name, _ in model.named_buffers() if name.rpartition(".")[2] not in DERIVED_BUFFERS
        }

    def require_match(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        """Raises WeightMismatch unless ``shapes`` are exactly the parameters of this rank, in ``dtype``."""
        live = set(self._dtypes)
        if missing := sorted((live | self._state_buffers) - set(shapes)):
            raise WeightMismatch(f"the plan leaves out {len(missing)} of this engine's tensors, such as {missing[0]}")
        if unknown := sorted(set(shapes) - live):
            raise WeightMismatch(f"the plan has {len(unknown)} parameters this engine lacks, such as {unknown[0]}")
        for name, shape in shapes.items():
            if tuple(shape) != self._shapes[name]:
                raise WeightMismatch(f"{name} is {tuple(shape)} in the plan and {self._shapes[name]} in the engine")
            if self._dtypes[name] != dtype:
                raise WeightMismatch(f"{name} is staged in {dtype} and the engine holds {self._dtypes[name]}")

    @torch.no_grad()
    def install(self, staged: Mapping[str, Tensor]) -> Undo:
        """Replace all parameters by copies of ``staged`` and pack them; on any error the old ones are back in place.

        ``staged`` must have passed ``require_match``.
        """
        befores: list[_Before] = []
        try:
            for path, leaves in _by_module(staged).items():
                befores.append(_Before.of(self._modules[path]))
                self._fill(path, leaves)
            for name, owner in self._tied.items():
                path, _, leaf = name.rpartition(".")
                befores.append(_Before.of(self._modules[path]))
                self._modules[path]._parameters[leaf] = self._parameter(owner)
                _pack(self._modules[path])
        except BaseException:
            Undo(tuple(befores))()
            raise
        return Undo(tuple(befores))

    def _fill(self, path: str, leaves: Mapping[str, Tensor]) -> None:
        module = self._modules[path]
        for leaf, tensor in leaves.items():
            module._parameters[leaf] = nn.Parameter(tensor.clone(), requires_grad=False)
        _pack(module)

    def _parameter(self, name: str) -> nn.Parameter:
        path, _, leaf = name.rpartition(".")
        parameter: nn.Parameter | None = self._modules[path]._parameters[leaf]
        assert parameter is not None, name
        return parameter

    # --- self check ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def probe(self, staged: Mapping[str, Tensor], turn: int) -> None:
        """Compare what modules compute with what ``staged`` says they should: all of one layer, and the head.

        ``turn`` picks the layer, so that syncs in a row go through all of them. It costs about one decode step of one
        layer and catches handlers that still hold old weights.

        Raises:
            WeightMismatch: naming the module and the difference.
        """
        layers = sorted({number for name in staged if (number := _layer_number(name)) is not None})
        layer = layers[turn % len(layers)] if layers else None
        for path, leaves in _by_module(staged).items():
            if _layer_number(path) == layer or path == "lm_head":
                _probe_module(path, self._modules[path], leaves)
        for name, owner in self._tied.items():
            path, _, leaf = name.rpartition(".")
            _probe_module(path, self._modules[path], {leaf: staged[owner]})


def loaded_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Parameter shapes as the checkpoint loader saw them, from the record vLLM keeps for reloading.

    Biases are not in that record; they keep their shape when packed.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    shapes = {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        for leaf, tensor in get_layerwise_info(module).restore_metadata[0].items():
            name = f"{path}.{leaf}" if path else leaf
            if name in shapes:
                shapes[name] = tuple(tensor.shape)
    return shapes


def _tied_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, owner) of parameters that are another module's parameter too; the owner is the first of them."""
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners[id(parameter)]
        shared_module = _module_of(model, name) is _module_of(model, owner)
        if owner != name and not shared_module:
            yield name, owner


def _module_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _by_module(staged: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    grouped: dict[str, dict[str, Tensor]] = {}
    for name, tensor in staged.items():
        path, _, leaf = name.rpartition(".")
        grouped.setdefault(path, {})[leaf] = tensor
    return grouped


def _layer_number(name: str) -> int | None:
    match = re.search(r"\blayers\.(\d+)\.", name + ".")
    return int(match.group(1)) if match else None


def _pack(module: nn.Module) -> None:
    """Let vLLM bring the module's checkpoint-layout parameters into the form its kernels want."""
    method = getattr(module, "quant_method", None)
    if method is None:
        return
    if (kernel := getattr(method, "moe_kernel", None)) is not None:
        kernel.fused_experts.process_weights_after_loading(module)
    else:
        method.process_weights_after_loading(module)


def _probe_module(path: str, module: nn.Module, leaves: Mapping[str, Tensor]) -> None:
    method = getattr(module, "quant_method", None)
    if method is None:
        pairs = [(getattr(module, leaf), tensor) for leaf, tensor in leaves.items()]
    elif "w13_weight" in leaves:
        pairs = [_experts_outputs(module, leaves["w13_weight"], leaves["w2_weight"])]
    else:
        pairs = [_linear_outputs(module, leaves["weight"], leaves.get("bias"))]
    for found, expected in pairs:
        tolerance = _PROBE_TOLERANCE[expected.dtype] * float(expected.abs().max().clamp_min(1e-20))
        difference = float((found.float() - expected.float()).abs().max())
        if not difference <= tolerance:
            raise WeightMismatch(
                f"{path} does not compute with the installed weights: its output differs by {difference:.2e}, "
                f"allowed {tolerance:.2e}"
            )


def _probe_input(columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_PROBE_TOKENS, columns, generator=generator).to(dtype)


def _linear_outputs(module: Any, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(what the module computes, what it should), both [tokens, rows of this rank]."""
    x = _probe_input(weight.shape[1], weight.dtype)
    return module.quant_method.apply(module, x, getattr(module, "bias", None)), functional.linear(x, weight, bias)


def _experts_outputs(module: Any, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The same for experts ([E, 2I, H] and [E, H, I] of this rank), token t going to experts t and t + 1 alone."""
    num_experts, _, hidden = w13.shape
    x = _probe_input(hidden, w13.dtype)
    top_k = min(2, num_experts)
    ids = (torch.arange(_PROBE_TOKENS)[:, None] + torch.arange(top_k)[None]) % num_experts
    weights = torch.full((_PROBE_TOKENS, top_k), 1.0 / top_k)
    found = module.quant_method.forward_native(module, x.clone(), weights, ids.to(torch.int32), None, None)
    expected = torch.zeros_like(x, dtype=torch.float32)
    for token in range(_PROBE_TOKENS):
        for expert in ids[token].tolist():
            gate, up = functional.linear(x[token], w13[expert]).chunk(2)
            expected[token] += functional.linear(functional.silu(gate) * up, w2[expert]).float() / top_k
    return found, expected.to(x.dtype)
