"""Putting new weights into a live vLLM model, and taking them out again.

vLLM keeps weights in the form its kernels want, made once after loading: on CPU every linear layer's weight moves into
a packed oneDNN handler (``layer.cpu_linear``) and leaves an empty parameter behind, and expert weights are prepacked in
place. So writing into the live parameters does nothing for linear layers and corrupts experts, and vLLM's own
reloading misses tied heads and prepacks experts over prepacked ones (both silently). Here a stand-in of every module
gets the whole shard in the layout a checkpoint loader would have left, and the module's own
``process_weights_after_loading`` packs it, exactly as at start-up, while the module itself goes on serving:

    linear, embedding, head   quant_method.process_weights_after_loading(stand_in)
    experts                   quant_method.moe_kernel.fused_experts.process_weights_after_loading(stand_in)
    tied head                 given the new embedding parameter, then as a linear layer
    latent attention          attention.process_weights_after_loading(dtype), after the layer it derives from
    vectors                   nothing to pack: norms, biases, and the router's, which vLLM refers to from elsewhere

Installing is then an exchange between modules and stand-ins, of references and of the vectors' values. It takes next to
no time, and the same exchange again gives the old numbers back bit for bit. Modules that are packed in any other way
are refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

DERIVED = frozenset(
    {
        "cos_sin_cache",
        "_k_scale",
        "_v_scale",
        "_q_scale",
        "_prob_scale",
        "_expert_map",
        "expert_mask",
        "expert_global_to_physical",
        "expert_physical_to_global",
        "expert_local_to_global",
        "W_UV",
        "W_UK_T",
    }
)
"""Tensors that vLLM computes from the config or from others. Any other is state, and a plan without it is refused."""

REFITTABLE = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"})
"""vLLM's classes that pack weights in a way that is known here."""
REFITTABLE_EXPERTS = frozenset({"CPUUnquantizedExperts"})
"""vLLM's kernels for experts whose weights can be replaced."""

_PACKED_HANDLER = "cpu_linear"
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_PROBE_TOKENS = 4
_PROBE_ROWS = 4096
"""A head has many more rows, and the product that it is compared with would need as much memory again."""


T = TypeVar("T")


class WeightMismatch(ValueError):
    """The staged weights are not the weights of this model, or are not what it computes with."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A module, and a stand-in that holds what is not in place: first the new weights, after an exchange the old."""

    module: nn.Module
    stand_in: nn.Module
    vectors: dict[str, Tensor]

    @torch.no_grad()
    def exchange(self) -> None:
        """What is in place for what is not."""
        mine, other = self.module.__dict__, self.stand_in.__dict__
        mine["_parameters"], other["_parameters"] = other["_parameters"], mine["_parameters"]
        if _PACKED_HANDLER in mine:
            mine[_PACKED_HANDLER], other[_PACKED_HANDLER] = other[_PACKED_HANDLER], mine[_PACKED_HANDLER]
        for leaf, vector in self.vectors.items():
            parameter = self.module._parameters[leaf]
            assert parameter is not None, leaf
            before = parameter.clone()
            parameter.copy_(vector)
            vector.copy_(before)


@dataclass(frozen=True, slots=True)
class Prepared:
    """New weights in the form the kernels want, beside those that are served."""

    pairs: tuple[_Pair, ...]

    def exchange(self) -> None:
        """Put them in place, or back out."""
        for pair in self.pairs:
            pair.exchange()


class LiveModel:
    """The weights of one engine rank.

    ``model`` is the module vLLM runs; ``loaded_shapes`` are its parameters' shapes before they were packed.
    """

    def __init__(self, model: nn.Module, loaded_shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._modules = dict(model.named_modules())
        self._shapes = dict(loaded_shapes)
        self._dtypes = {name: p.dtype for name, p in model.named_parameters() if _leaf(name) not in DERIVED}
        self._tied = dict(_tied_parameters(model))
        self._latent = {path: module for path, module in self._modules.items() if hasattr(module, "W_UK_T")}
        self._state_buffers = {name for name, _ in model.named_buffers() if _leaf(name) not in DERIVED}

    def require_match(self, staged: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Check that {name: (shape, dtype)} are exactly the parameters of this rank, and can be put in place.

        Raises:
            WeightMismatch: naming the parameter or the module.
        """
        live = set(self._dtypes)
        if missing := sorted((live | self._state_buffers) - set(staged)):
            raise WeightMismatch(f"the plan leaves out {len(missing)} of this engine's tensors, such as {missing[0]}")
        if unknown := sorted(set(staged) - live):
            raise WeightMismatch(f"the plan has {len(unknown)} parameters this engine lacks, such as {unknown[0]}")
        for name, (shape, dtype) in staged.items():
            if tuple(shape) != self._shapes[name]:
                raise WeightMismatch(f"{name} is {tuple(shape)} in the plan and {self._shapes[name]} in the engine")
            if self._dtypes[name] != dtype:
                raise WeightMismatch(f"{name} is staged in {dtype} and the engine holds {self._dtypes[name]}")
        for path in _by_module(staged):
            _require_refittable(path, self._modules[path])

    def require_experts(self, experts: Mapping[str, Sequence[int]]) -> None:
        """Check that {module of experts: the experts stacked in it, in order} is what this rank has.

        Raises:
            WeightMismatch: naming the module.
        """
        for path, planned in experts.items():
            placed = _own_experts(self._modules[path], len(planned))
            if list(planned) != placed:
                raise WeightMismatch(f"{path} holds experts {placed} and the plan sends it {list(planned)}")

    @torch.no_grad()
    def prepare(self, staged: Mapping[str, Tensor], turn: int) -> Prepared:
        """Pack ``staged``, which must have passed ``require_match``, and prove that it computes what it should.

        What is served is not touched. Compared are the modules of one layer and the head; ``turn`` picks the layer, so
        that syncs in a row go through all of them. It costs about one decode step of one layer.

        Raises:
            WeightMismatch: naming the module and the difference.
        """
        stand_ins: dict[str, nn.Module] = {}
        vectors: dict[str, dict[str, Tensor]] = {}
        for path, leaves in _by_module(staged).items():
            stand_ins[path] = _stand_in(self._modules[path])
            vectors[path] = {leaf: tensor.clone() for leaf, tensor in leaves.items() if tensor.ndim == 1}
            _fill(stand_ins[path], {leaf: tensor for leaf, tensor in leaves.items() if tensor.ndim > 1})
        for path, module in self._latent.items():
            stand_ins[path] = _derived(module, {id(self._modules[p]): one for p, one in stand_ins.items()})
        for name, owner in self._tied.items():
            path, _, leaf = name.rpartition(".")
            stand_ins[path] = _stand_in(self._modules[path])
            stand_ins[path]._parameters[leaf] = _parameter_of(stand_ins, owner)
            _pack(stand_ins[path])
        self._probe(stand_ins, staged, turn)
        return Prepared(tuple(_Pair(self._modules[p], one, vectors.get(p, {})) for p, one in stand_ins.items()))

    def _probe(self, stand_ins: Mapping[str, nn.Module], staged: Mapping[str, Tensor], turn: int) -> None:
        layers = sorted({number for name in staged if (number := _layer_number(name)) is not None})
        layer = layers[turn % len(layers)] if layers else None
        for path, leaves in _by_module(staged).items():
            if _layer_number(path) == layer or path == "lm_head":
                _probe_module(path, stand_ins[path], leaves)
        for name, owner in self._tied.items():
            path, _, leaf = name.rpartition(".")
            _probe_module(path, stand_ins[path], {leaf: staged[owner]})
        for path in self._latent:
            if _layer_number(path) == layer:
                _probe_latent(path, stand_ins[path], staged[path.partition(".mla_attn")[0] + ".kv_b_proj.weight"])


def _stand_in(module: nn.Module) -> nn.Module:
    """The same module with a parameter list of its own."""
    stand_in = copy.copy(module)
    stand_in.__dict__["_parameters"] = dict(module._parameters)
    return stand_in


def _fill(stand_in: nn.Module, matrices: Mapping[str, Tensor]) -> None:
    """Give it new matrices and pack them; what it keeps of them is its own, not the staged memory."""
    for leaf, tensor in matrices.items():
        stand_in._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    _pack(stand_in)
    for leaf, tensor in matrices.items():
        kept = stand_in._parameters[leaf]
        if kept is not None and kept.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            stand_in._parameters[leaf] = nn.Parameter(tensor.clone(), requires_grad=False)


def _derived(latent: Any, stand_ins: Mapping[int, nn.Module]) -> nn.Module:
    """Latent attention with its own form of the new ``kv_b_proj``, which is among ``stand_ins``, by the module's id."""
    stand_in: Any = _stand_in(latent)
    stand_in.__dict__["_modules"] = {name: stand_ins.get(id(m), m) for name, m in latent._modules.items()}
    for leaf in ("W_UV", "W_UK_T"):  # vLLM would overwrite the old ones
        stand_in._parameters[leaf] = nn.Parameter(torch.empty_like(latent._parameters[leaf]), requires_grad=False)
    stand_in.process_weights_after_loading(stand_in.W_UV.dtype)
    return cast("nn.Module", stand_in)


def _parameter_of(modules: Mapping[str, nn.Module], name: str) -> nn.Parameter:
    path, _, leaf = name.rpartition(".")
    parameter: nn.Parameter | None = modules[path]._parameters[leaf]
    assert parameter is not None, name
    return parameter


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
    """(name, owner) of matrices that are another module's parameter too; the owner is the first of them.

    Shared vectors need no care: they are overwritten in place.
    """
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners[id(parameter)]
        shared_module = _module_of(model, name) is _module_of(model, owner)
        if owner != name and parameter.ndim > 1 and not shared_module:
            yield name, owner


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _module_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _by_module(staged: Mapping[str, T]) -> dict[str, dict[str, T]]:
    grouped: dict[str, dict[str, T]] = {}
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


def _require_refittable(path: str, module: Any) -> None:
    method = getattr(module, "quant_method", None)
    name = type(method).__name__
    if method is not None and name not in REFITTABLE:
        raise WeightMismatch(
            f"{path} packs its weights by {name}, which this bridge cannot repeat; serve it unquantised"
        )
    kernel = getattr(method, "moe_kernel", None)
    experts = "" if kernel is None else type(kernel.fused_experts).__name__
    if experts and experts not in REFITTABLE_EXPERTS:
        raise WeightMismatch(f"{path} computes with {experts}, whose weights cannot be replaced; choose another kernel")


def _own_experts(module: Any, count: int) -> list[int]:
    """Global numbers of the experts in the module's stack, in order."""
    places = module._expert_map
    if places is None:
        return list(range(count))
    numbers = torch.nonzero(places >= 0).flatten()
    return [int(number) for number in numbers[torch.argsort(places[numbers])]]


def _probe_module(path: str, module: nn.Module, leaves: Mapping[str, Tensor]) -> None:
    if "w13_weight" in leaves:
        _require_close(path, *_experts_outputs(module, leaves["w13_weight"], leaves["w2_weight"]))
    elif "weight" in leaves and getattr(module, "quant_method", None) is not None:
        _require_close(path, *_linear_outputs(module, leaves["weight"], leaves.get("bias")))


def _probe_latent(path: str, module: Any, kv_up: Tensor) -> None:
    """Its two parameters against ``kv_up``, [heads * (nope + v), rank]."""
    per_head = kv_up.view(module.num_heads, -1, kv_up.shape[1])
    nope, value = per_head.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    _require_close(path, module.W_UK_T, nope)
    _require_close(path, module.W_UV, value.transpose(1, 2))


def _require_close(path: str, found: Tensor, expected: Tensor) -> None:
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
    """(what the module computes, what it should), both [tokens, the first rows of this rank]."""
    x = _probe_input(weight.shape[1], weight.dtype)
    own_bias = None if bias is None else bias[:_PROBE_ROWS]
    found = module.quant_method.apply(module, x, bias)[:, :_PROBE_ROWS]
    return found, functional.linear(x, weight[:_PROBE_ROWS], own_bias)


def _experts_outputs(module: Any, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The same for experts ([E, 2I, H] and [E, H, I] of this rank), token t going to places t and t + 1 alone."""
    num_experts, _, hidden = w13.shape
    x = _probe_input(hidden, w13.dtype)
    top_k = min(2, num_experts)
    places = (torch.arange(_PROBE_TOKENS)[:, None] + torch.arange(top_k)[None]) % num_experts
    ids = torch.tensor(_own_experts(module, num_experts))[places]
    weights = torch.full((_PROBE_TOKENS, top_k), 1.0 / top_k)
    found = module.quant_method.forward_native(module, x.clone(), weights, ids.to(torch.int32), None, None)
    expected = torch.zeros_like(x, dtype=torch.float32)
    for token in range(_PROBE_TOKENS):
        for place in places[token].tolist():
            gate, up = functional.linear(x[token], w13[place]).chunk(2)
            expected[token] += functional.linear(functional.silu(gate) * up, w2[place]).float() / top_k
    return found, expected.to(x.dtype)
