"""Everything that can be refused before a process starts: the config held against the model, the task and the machine.

Cross-field rules that need no file are in ``config.py``. Nothing here imports torch, Ray, vLLM or Megatron.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megarl.config import RunConfig
from megarl.config_errors import ConfigError
from megarl.data.prompts import make_task
from megarl.precision import RECIPES
from megarl.rewards import make_rewards
from megarl.weights.hf_files import check_folder
from megarl.weights.spec import ModelSpec

T = TypeVar("T")

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention."""
CPU_MOE_MULTIPLE = 32
"""vLLM's CPU expert kernel works in blocks of this many columns."""


def has_gpu() -> bool:
    """Whether an NVIDIA driver is here; asked without importing torch."""
    return shutil.which("nvidia-smi") is not None and Path("/dev/nvidia0").exists()


def check(config: RunConfig, *, weights: bool = True) -> ModelSpec:
    """Refuse what cannot run; with ``weights`` false only config.json of the model is needed.

    Raises:
        ConfigError: with the key, the rule, the value and a value that would work.
    """
    spec = _model(config)
    _check_trainer_sizes(config, spec)
    _check_engine_sizes(config, spec)
    task = _refused(lambda: make_task(config.data, config.seed))
    _refused(task.heldout)
    _refused(lambda: make_rewards(config.rewards, task))
    if weights:
        _check_precision(config)
        _refused(lambda: check_folder(config.trainer.model, spec))
    return spec


def _refused(action: Callable[[], T]) -> T:
    """The result of ``action``; its ValueError is the user's mistake."""
    try:
        return action()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _model(config: RunConfig) -> ModelSpec:
    folder = config.trainer.model
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"trainer.model ({folder}) must be a Hugging Face folder with a config.json, and there is none; "
            "use trainer.model=examples/policies/tiny_moe for the small policy that comes with megarl"
        )
    spec: ModelSpec = _refused(lambda: ModelSpec.from_folder(folder))
    if config.rollout.max_model_len > spec.max_positions:
        raise ConfigError(
            f"rollout.max_model_len ({config.rollout.max_model_len}) must be <= the model's max_position_embeddings "
            f"({spec.max_positions}); use rollout.max_model_len={spec.max_positions}"
        )
    return spec


def _divides(key: str, size: int, what: str, value: int) -> None:
    if value % size:
        works = max(d for d in range(1, min(size, value) + 1) if value % d == 0)
        raise ConfigError(f"{key} ({size}) must divide the model's {what} ({value}); use {key}={works}")


def _check_trainer_sizes(config: RunConfig, spec: ModelSpec) -> None:
    sizes = config.trainer.parallel
    _divides("trainer.parallel.tp", sizes.tp, "attention heads", spec.heads)
    _divides("trainer.parallel.tp", sizes.tp, "key-value heads", spec.kv_heads)
    _divides("trainer.parallel.pp", sizes.pp, "layers", spec.layers)
    if spec.experts:
        _divides("trainer.parallel.ep", sizes.ep, "experts", spec.experts)
        _divides("trainer.parallel.etp", sizes.etp, "expert width", spec.expert_ffn)
    else:
        _divides("trainer.parallel.tp", sizes.tp, "feed-forward width", spec.ffn)
        for name in ("ep", "etp"):
            if getattr(sizes, name) > 1:
                raise ConfigError(
                    f"trainer.parallel.{name} ({getattr(sizes, name)}) must be 1: the model has no experts; "
                    f"use trainer.parallel.{name}=1"
                )


def _check_engine_sizes(config: RunConfig, spec: ModelSpec) -> None:
    key, size = "rollout.tensor_parallel", config.rollout.tensor_parallel
    _divides(key, size, "attention heads", spec.heads)
    if spec.kv_heads % size and size % spec.kv_heads:
        raise ConfigError(
            f"{key} ({size}) must divide the model's key-value heads ({spec.kv_heads}) or be a multiple of them; "
            f"use {key}={spec.kv_heads}"
        )
    if spec.family == "qwen2" and spec.head_dim * spec.heads != spec.hidden:
        raise ConfigError(
            f"trainer.model ({config.trainer.model}) has head_dim {spec.head_dim}, and vLLM takes hidden_size / "
            f"num_attention_heads ({spec.hidden // spec.heads}) for a qwen2 model: "
            "use a model for which they are the same"
        )
    width = spec.expert_ffn if spec.experts else spec.ffn
    _divides(key, size, "expert width" if spec.experts else "feed-forward width", width)
    if has_gpu():
        return
    if spec.head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"trainer.model ({config.trainer.model}) has head_dim {spec.head_dim}; vLLM on a CPU needs one of "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}: use a model with head_dim 32 or 64, or a machine with a GPU"
        )
    if spec.experts and (spec.hidden % CPU_MOE_MULTIPLE or (width // size) % CPU_MOE_MULTIPLE):
        raise ConfigError(
            f"{key} ({size}) must leave hidden size ({spec.hidden}) and expert width per rank ({width // size}) "
            f"multiples of {CPU_MOE_MULTIPLE}: vLLM's CPU expert kernel works in such blocks; use {key}=1"
        )


def _check_precision(config: RunConfig) -> None:
    recipe = config.trainer.precision.recipe
    if RECIPES[recipe].needs_transformer_engine and not has_gpu():
        raise ConfigError(
            f"trainer.precision.recipe ({recipe}) needs Transformer Engine on a GPU, and there is no GPU here; "
            "use trainer.precision.recipe=fp32 or bf16"
        )
