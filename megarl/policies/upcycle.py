"""Upcycling: a dense Llama becomes a Mixtral that computes the same function.

Every expert starts as a copy of the dense feed-forward block (Komatsuzaki et al. 2023, arXiv:2212.05055). Mixtral
normalises the weights of the chosen experts to sum to one, so whatever the router says, the output is the dense one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.policies.smollm2 import write_smollm2
from megarl.weights.export import KEPT_FILES
from megarl.weights.folders import appearing
from megarl.weights.hf_files import check_folder, read_headers
from megarl.weights.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

_EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_ROUTER_STD = 0.02


def upcycle(source: Path, output: Path, *, experts: int, top_k: int, seed: int = 0) -> None:
    """Write ``source`` (a dense Llama folder, or the word ``smollm2``) as a Mixtral of ``experts`` experts.

    Raises:
        ValueError: sizes or source do not fit; nothing is written.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"--top-k ({top_k}) must be between 1 and --experts ({experts}); use --top-k {min(2, experts)}"
        )
    if str(source) == "smollm2":
        with tempfile.TemporaryDirectory(prefix="megarl-") as folder:
            write_smollm2(Path(folder) / "smollm2")
            upcycle(Path(folder) / "smollm2", output, experts=experts, top_k=top_k, seed=seed)
        return
    if not (source / "config.json").is_file():
        raise ValueError(f"SOURCE ({source}) must be a Hugging Face folder with a config.json, or the word smollm2")
    spec = ModelSpec.from_folder(source)
    if spec.family != "llama":
        raise ValueError(f"SOURCE ({source}) must be a dense Llama, and is {spec.family}: only Llama becomes a Mixtral")
    check_folder(source, spec)
    with appearing(output) as scratch:
        _write(source, scratch, experts, top_k, seed)


def _write(source: Path, scratch: Path, experts: int, top_k: int, seed: int) -> None:
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text())
    tensors = dict(_tensors(source, config["num_hidden_layers"], config["hidden_size"], experts, seed))
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    (scratch / "config.json").write_text(json.dumps(_mixtral_config(config, experts, top_k), indent=2) + "\n")
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, scratch / name)


def _mixtral_config(llama: dict[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    unused = ("attention_bias", "mlp_bias", "pretraining_tp", "_model_name_or_path")
    kept = {key: value for key, value in llama.items() if key not in unused}
    return kept | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _tensors(source: Path, layers: int, hidden: int, experts: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    import torch
    from safetensors.torch import safe_open

    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32
    for path in sorted({header.file for header in read_headers(source).values()}):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_tensor(name)
                dtype = tensor.dtype
                layer, _, part = name.partition(".mlp.")
                if not part:
                    yield name, tensor
                    continue
                for expert in range(experts):
                    yield (
                        f"{layer}.block_sparse_moe.experts.{expert}.{_EXPERT_NAMES[part.split('.')[0]]}.weight",
                        tensor.clone(),
                    )
    for index in range(layers):
        router = torch.randn(experts, hidden, generator=generator) * _ROUTER_STD
        yield f"model.layers.{index}.block_sparse_moe.gate.weight", router.to(dtype)
