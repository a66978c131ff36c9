"""Everything that can be refused before a process starts: the config held against the model, the task and the machine.

Rules that need no file are in ``config.py``. Nothing here imports torch, Ray, vLLM or Megatron.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megarl.config import RunConfig, changed, problems
from megarl.config_errors import ConfigError, Problem, Values, users_mistake
from megarl.data.prompts import make_task
from megarl.precision import RECIPES
from megarl.rewards import make_rewards
from megarl.trainer.settings import layout_of
from megarl.weights.engine_layout import EngineLayout
from megarl.weights.megatron_files import check_model
from megarl.weights.spec import ModelSpec

Rule = Callable[[RunConfig, ModelSpec], Iterator[Problem]]

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention."""
CPU_LATENT_DIM = 576
"""Size of a cached latent vector that vLLM's CPU kernel for latent attention is compiled for."""
CPU_MOE_MULTIPLE = 32
"""vLLM's CPU expert kernel works in blocks of this many columns."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A folder with one of these has a tokenizer that transformers can load."""


def has_gpu() -> bool:
    """Whether an NVIDIA driver is here; asked without importing torch."""
    return shutil.which("nvidia-smi") is not None and Path("/dev/nvidia0").exists()


def check(config: RunConfig, *, weights: bool = True) -> ModelSpec:
    """Refuse what cannot run; the model's spec.

    With ``weights`` false (a plan, perhaps for another machine) only config.json of the model is needed, and what this
    machine can do does not matter.

    Raises:
        ConfigError: with the key, the rule, the value and a value that would work.
    """
    spec = _model(config)
    here: tuple[Rule, ...] = (_cpu_engine_problems, _precision_problems) if weights else ()
    _refuse(config, spec, (_length_problems, _trainer_problems, _pipeline_problems, _engine_problems, *here))
    with users_mistake():
        task = make_task(config.data, config.seed)
        task.heldout()
        make_rewards(config.rewards, task)
    if weights:
        with users_mistake("trainer.model"):
            check_model(config.trainer.model, spec)
            _check_tokenizer(config.trainer.model)
    return spec


def _refuse(config: RunConfig, spec: ModelSpec, rules: Sequence[Rule]) -> None:
    """Raise for the first rule that is broken, with a way out that breaks no other."""

    def broken(candidate: RunConfig) -> Problem | None:
        return next((problem for rule in rules for problem in rule(candidate, spec)), None)

    def works(values: Values) -> bool:
        candidate = changed(config, values)
        return not any(problems(candidate)) and broken(candidate) is None

    problem = broken(config)
    if problem:
        raise ConfigError(problem.text(works))


def _model(config: RunConfig) -> ModelSpec:
    folder = config.trainer.model
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"trainer.model ({folder}) must be a Hugging Face folder with a config.json, and there is none; "
            "use trainer.model=examples/policies/tiny_moe for the small policy that comes with megarl"
        )
    with users_mistake("trainer.model"):
        return ModelSpec.from_folder(folder)


def _check_tokenizer(folder: Path) -> None:
    """What the renderer will ask of the folder, found without transformers, whose import takes seconds."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"trainer.model ({folder}) must hold a tokenizer, and there is none of {', '.join(TOKENIZER_FILES)}; "
            "copy the files of the model's tokenizer there"
        )
    settings = folder / "tokenizer_config.json"
    in_settings = settings.is_file() and "chat_template" in json.loads(settings.read_text())
    if not in_settings and not (folder / "chat_template.jinja").is_file():
        raise ValueError(
            f"trainer.model ({folder}) must have a chat template, in tokenizer_config.json or chat_template.jinja; "
            "use an instruction-tuned model, or write the template as chat_template.jinja"
        )


# --- rules -----------------------------------------------------------------------------------------------------------


def _length_problems(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    key, length, positions = "rollout.max_model_len", config.rollout.max_model_len, spec.max_positions
    if length > positions:
        prompt = min(config.data.max_prompt_tokens, positions // 2)
        shorter = {"data.max_prompt_tokens": prompt, "rollout.max_tokens": positions - prompt}
        rule = f"must be <= the model's max_position_embeddings ({positions})"
        yield Problem(key, length, rule, ({key: positions}, {key: positions} | shorter))


def _trainer_problems(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    sizes = config.trainer.parallel
    is_even = sizes.first_stage_layers is None and sizes.last_stage_layers is None and not sizes.pipeline_layout
    parts = [
        ("tp", "attention heads", spec.heads),
        ("pp", "layers", spec.layers if is_even else 0),
        ("tp", "feed-forward width", spec.ffn if spec.dense_layers else 0),
        ("tp", "shared experts' width", spec.shared_ffn),
        ("ep", "experts", spec.experts),
        ("etp", "expert width", spec.expert_ffn),
    ]
    for name, what, total in parts:
        size = getattr(sizes, name)
        if total % size:
            rule = f"must divide the model's {what} ({total})"
            yield Problem(f"trainer.parallel.{name}", size, rule, _smaller_groups(config, name, total))
    if spec.latent is None and spec.kv_heads % sizes.tp and sizes.tp % spec.kv_heads:
        rule = f"must divide the model's key-value heads ({spec.kv_heads}) or be a multiple of them"
        yield Problem("trainer.parallel.tp", sizes.tp, rule, _smaller_groups(config, "tp", spec.kv_heads))
    for name in ("ep", "etp"):
        if not spec.experts and getattr(sizes, name) != 1:
            rule = "must be 1: the model has no experts"
            yield Problem(f"trainer.parallel.{name}", getattr(sizes, name), rule, _smaller_groups(config, name, 1))


def _pipeline_problems(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    """Layers on stages, where they are not simply shared out."""
    sizes = config.trainer.parallel
    given = [
        name
        for name in ("pipeline_layout", "first_stage_layers", "last_stage_layers")
        if getattr(sizes, name) not in ("", None)
    ]
    try:
        layout_of(sizes).check(spec)
    except ValueError as error:
        shared_out: Values = {f"trainer.parallel.{name}": "" if name == "pipeline_layout" else None for name in given}
        names = given or ["vpp"]
        reason = str(error).rpartition(";")[0]
        yield Problem(
            f"trainer.parallel.{names[0]}",
            getattr(sizes, names[0]),
            f"must fit the model and the stages: {reason}",
            (shared_out, {**shared_out, "trainer.parallel.vpp": 1}),
        )


def _smaller_groups(config: RunConfig, name: str, total: int) -> tuple[Values, ...]:
    """The divisors of ``total`` up to the size ``name``, large ones first: alone, then with the world shrunk along."""
    key, world = f"trainer.parallel.{name}", config.trainer.parallel.world_size
    size = getattr(config.trainer.parallel, name)
    fitting = [d for d in range(min(size, total), 0, -1) if total % d == 0]
    alone = [{key: d} for d in fitting]
    return (*alone, *({key: d, "trainer.parallel.world_size": world // size * d} for d in fitting))


def _engine_problems(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    key, size = "rollout.tensor_parallel", config.rollout.tensor_parallel
    parts = (
        ("attention heads", spec.heads),
        ("expert width", 0 if config.rollout.expert_parallel else spec.expert_ffn),
        ("feed-forward width", spec.ffn if spec.dense_layers else 0),
        ("shared experts' width", spec.shared_ffn),
        ("padded vocabulary", EngineLayout(size).padded_vocab(spec.vocab)),
    )
    for what, total in parts:
        if total % size:
            yield Problem(key, size, f"must divide the model's {what} ({total})", _smaller_engines(config, spec))
    placement = config.rollout.expert_placement
    if placement == "round_robin" and not (spec.sigmoid_router and spec.sigmoid_router.groups > 1):
        rule = "must be linear for a model whose experts are not in groups: vLLM takes linear for it"
        yield Problem("rollout.expert_placement", placement, rule, ({"rollout.expert_placement": "linear"},))
    if spec.latent is None and spec.kv_heads % size and size % spec.kv_heads:
        rule = f"must divide the model's key-value heads ({spec.kv_heads}) or be a multiple of them"
        yield Problem(key, size, rule, _smaller_engines(config, spec))
    if spec.family == "qwen2" and spec.head_dim * spec.heads != spec.hidden:
        yield Problem(
            "trainer.model",
            config.trainer.model,
            f"must have a head_dim of hidden_size / num_attention_heads ({spec.hidden / spec.heads:g}), not "
            f"{spec.head_dim}: vLLM knows no other for qwen2",
            advice="use a model for which they are the same",
        )


def _smaller_engines(config: RunConfig, spec: ModelSpec) -> tuple[Values, ...]:
    most = min(config.rollout.tensor_parallel, spec.heads)
    return tuple({"rollout.tensor_parallel": size} for size in range(most, 0, -1))


def _cpu_engine_problems(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    """What vLLM needs where there is no GPU."""
    if has_gpu():
        return
    if spec.latent and spec.latent.kv_lora + spec.latent.rope_dim != CPU_LATENT_DIM:
        yield Problem(
            "trainer.model",
            config.trainer.model,
            f"must have kv_lora_rank + qk_rope_head_dim of {CPU_LATENT_DIM}, the one size of vLLM's CPU kernel, not "
            f"{spec.latent.kv_lora + spec.latent.rope_dim}",
            advice="use a model with 512 + 64, or a machine with a GPU",
        )
    if spec.latent is None and spec.head_dim not in CPU_HEAD_DIMS:
        yield Problem(
            "trainer.model",
            config.trainer.model,
            f"must have a head_dim that vLLM's CPU attention knows ({', '.join(map(str, CPU_HEAD_DIMS))}), not "
            f"{spec.head_dim}",
            advice="use a model with a head_dim of 32 or 64, or a machine with a GPU",
        )
    blocks = f"of {CPU_MOE_MULTIPLE}: vLLM's CPU expert kernel works in such blocks"
    if math.gcd(spec.hidden, spec.expert_ffn) % CPU_MOE_MULTIPLE and spec.experts:
        yield Problem(
            "trainer.model",
            config.trainer.model,
            f"must have hidden size ({spec.hidden}) and expert width ({spec.expert_ffn}) in multiples {blocks}",
            advice="use another model, or a machine with a GPU",
        )
    key, size = "rollout.tensor_parallel", config.rollout.tensor_parallel
    if not config.rollout.expert_parallel and spec.expert_ffn // size % CPU_MOE_MULTIPLE:
        rule = f"must leave every rank an expert width ({spec.expert_ffn} / {size}) that is a multiple {blocks}"
        yield Problem(key, size, rule, _smaller_engines(config, spec))


def _precision_problems(config: RunConfig, spec: ModelSpec) -> Iterator[Problem]:
    key, recipe = "trainer.precision.recipe", config.trainer.precision.recipe
    if RECIPES[recipe].needs_transformer_engine and not has_gpu():
        rule = "must be fp32 or bf16 here: it needs Transformer Engine on a GPU, and there is none"
        yield Problem(key, recipe, rule, ({key: "fp32"}, {key: "bf16"}))
