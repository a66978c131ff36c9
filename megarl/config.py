"""The run configuration: one frozen record per component, read top-down like the loop.

``load`` reads a YAML file, applies ``key.path=value`` overrides and refuses what cannot run, with the key, the
rule, the value and a value that would work. It starts nothing and imports neither torch nor Ray.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """A mistake of the user's: key, rule, value, way out. Shown without a traceback, exit status 2."""


class Section(BaseModel):
    """A frozen part of the config; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=False)


class EvalConfig(Section):
    """Held-out evaluation."""

    every: int = Field(20, ge=1)
    """Steps between evaluations. The first and the last step are always evaluated."""
    num_prompts: int = Field(256, ge=1)
    """Held-out problems, fixed by the task and never trained on."""
    temperature: float = Field(0.0, ge=0.0)
    """0 is greedy: the least noisy accuracy."""


class DataConfig(Section):
    """Where prompts come from."""

    task: str
    """``reasoning_gym/<dataset>`` (procedural, with its own verifier) or ``jsonl`` (an own file)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task, such as the range of numbers of a reasoning-gym dataset."""
    path: Path | None = None
    """For ``jsonl``: a file with one ``{"prompt": ..., "answer": ...}`` per line."""
    eval_path: Path | None = None
    """For ``jsonl``: held-out problems in the same form."""
    system_prompt: str = ""
    """Put before every problem when not empty."""
    max_prompt_tokens: int = Field(512, ge=1)
    """A longer prompt is an error naming the prompt."""
    eval: EvalConfig = EvalConfig()


class RewardConfig(Section):
    """One part of the reward; the reward is the weighted sum."""

    name: str
    """``task`` (the task's own verifier), ``exact_match``, or ``path/to/file.py:function``."""
    weight: float = 1.0


class KlConfig(Section):
    """Penalty for leaving the reference policy."""

    coef: float = Field(0.0, ge=0.0)
    """0 keeps no reference model in memory."""
    estimator: Literal["k2", "k3", "k3_unbiased"] = "k3_unbiased"
    """k1 as a loss term has zero expected gradient and is not offered."""


class AlgorithmConfig(Section):
    """How rewards become a loss (docs: policies in docs/algorithms.md)."""

    name: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = "grpo"
    clip_low: float = Field(0.2, ge=0.0, lt=1.0)
    """PPO ratio lower bound, 1 - clip_low."""
    clip_high: float = Field(0.28, ge=0.0)
    """PPO ratio upper bound, 1 + clip_high; above clip_low it leaves room for exploration (DAPO)."""
    loss: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """What the sum of token losses is divided by."""
    kl: KlConfig = KlConfig()
    importance_cap: float = Field(2.0, ge=1.0)
    """Truncated importance sampling, trainer over engine, per token."""
    entropy_coef: float = 0.0
    zero_spread: Literal["drop", "keep"] = "drop"
    """Groups whose rewards are all equal: out of the loss and its denominator, or left in with advantage 0."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions cut at max_tokens: trained like others, or left out."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps over one batch of groups, each on its share of the prompts."""


class ParallelConfig(Section):
    """Megatron's parallel sizes; data parallel is what is left of ``world_size``."""

    world_size: int = Field(1, ge=1)
    """Trainer ranks."""
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    vpp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    etp: int = Field(1, ge=1)

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense layers."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world_size // (self.etp * self.ep * self.pp)


class PrecisionConfig(Section):
    """Number formats of the trainer."""

    recipe: Literal["fp32", "bf16", "delayed", "tensorwise", "blockwise", "mxfp8"] = "bf16"
    """fp32 on CPU (exact and, for toy models, faster); an fp8 recipe needs Transformer Engine."""


class OptimizerConfig(Section):
    """Adam, as Megatron's distributed optimizer runs it."""

    lr: float = Field(1e-6, gt=0.0)
    min_lr: float = Field(0.0, ge=0.0)
    warmup_steps: int = Field(0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    clip_grad: float = Field(1.0, ge=0.0)
    """Global gradient norm; 0 does not clip."""


class TrainerConfig(Section):
    """The Megatron side."""

    model: Path
    """A Hugging Face folder: config.json, safetensors, tokenizer."""
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_micro_batch: int = Field(8192, ge=1)
    """Packed length of one micro-batch: the knob for activation memory."""
    moe_aux_loss_coef: float = Field(0.0, ge=0.0)
    """Load-balancing loss of the router; 0 in RL, since it pulls the policy away from the reward."""
    timeout_s: float = Field(600.0, gt=0.0)
    """Deadline of one trainer call."""


class RolloutConfig(Section):
    """The vLLM side."""

    replicas: int = Field(1, ge=1)
    tensor_parallel: int = Field(1, ge=1)
    expert_parallel: bool = False
    dtype: Literal["fp32", "bf16"] = "bf16"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = Field(512, ge=1)
    """Longest completion."""
    max_model_len: int = Field(2048, ge=2)
    """Prompt and completion together."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences an engine decodes at once."""
    kv_cache_gib: float = Field(1.0, gt=0.0)
    """KV cache per engine on CPU; on GPUs vLLM takes what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = Field(0.6, gt=0.0, le=1.0)
    timeout_s: float = Field(600.0, gt=0.0)
    """Deadline of one engine call."""


class PlacementConfig(Section):
    """Who has the accelerators when."""

    kind: Literal["colocated", "disaggregated"] = "colocated"


class WeightsConfig(Section):
    """The weight bridge."""

    transport: Literal["auto", "shm"] = "auto"
    probe_every: int = Field(1, ge=0)
    """Syncs between checks that the engine's log-probabilities on fixed prompts equal the trainer's; 0 never."""
    probe_tolerance: float = Field(1e-4, gt=0.0)
    """Largest allowed difference in fp32; bf16 is compared with 0.25 instead."""


class MlflowConfig(Section):
    """Experiment tracking."""

    enabled: bool = True
    uri: str = ""
    """Any MLflow tracking URI; empty is a sqlite store beside the runs."""
    experiment: str = "megarl"


class TrackingConfig(Section):
    """What is recorded of a run."""

    mlflow: MlflowConfig = MlflowConfig()
    rollouts_every: int = Field(10, ge=0)
    """Steps between tables of sampled rollouts; 0 never."""
    rollouts_per_table: int = Field(8, ge=1)


class RecoveryConfig(Section):
    """Checkpoints."""

    every: int = Field(20, ge=0)
    """Steps between checkpoints; 0 only at the end."""
    keep: int = Field(2, ge=1)
    """Committed checkpoints kept."""


class SftConfig(Section):
    """Supervised warm start (``megarl sft``) on the task's own problems."""

    steps: int = Field(300, ge=1)
    batch_size: int = Field(256, ge=1)
    lr: float = Field(2e-3, gt=0.0)
    output: Path = Path("models/sft")


class RunConfig(Section):
    """A whole run."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0)
    max_steps: int = Field(ge=1)
    prompts_per_step: int = Field(ge=1)
    group_size: int = Field(ge=1)
    max_staleness: int = Field(0, ge=0)
    """Steps a sample may lag behind the weights; 0 is strictly on-policy."""
    data: DataConfig
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="task"),)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig
    rollout: RolloutConfig = RolloutConfig()
    placement: PlacementConfig = PlacementConfig()
    weights: WeightsConfig = WeightsConfig()
    tracking: TrackingConfig = TrackingConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    sft: SftConfig = SftConfig()
    output: Path = Path("runs")

    @property
    def run_folder(self) -> Path:
        """Everything a run writes lies below."""
        return self.output / self.name

    @model_validator(mode="after")
    def _check(self) -> Self:
        for rule in (_check_algorithm, _check_sampling, _check_parallel, _check_batch, _check_engine):
            rule(self)
        return self


def _check_algorithm(config: RunConfig) -> None:
    relative = config.algorithm.name != "reinforce"
    if relative and config.group_size < 2:
        raise ConfigError(
            f"group_size ({config.group_size}) must be >= 2 for {config.algorithm.name}: advantages compare "
            "siblings; use group_size=8, or algorithm.name=reinforce for 1"
        )
    if config.prompts_per_step % config.algorithm.updates_per_step:
        raise ConfigError(
            f"prompts_per_step ({config.prompts_per_step}) must divide by algorithm.updates_per_step "
            f"({config.algorithm.updates_per_step}): every update takes the same number of prompts; "
            f"use prompts_per_step={_next_multiple(config.prompts_per_step, config.algorithm.updates_per_step)}"
        )


def _check_sampling(config: RunConfig) -> None:
    rollout = config.rollout
    if rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature ({rollout.temperature}) must be > 0: greedy samples of one prompt are all the "
            "same and have no gradient; use rollout.temperature=1.0"
        )
    if rollout.top_p != 1.0:
        raise ConfigError(
            f"rollout.top_p ({rollout.top_p}) must be 1.0: the trainer does not know which tokens were cut off; "
            "use rollout.top_p=1.0"
        )
    if rollout.top_k != 0:
        raise ConfigError(
            f"rollout.top_k ({rollout.top_k}) must be 0: the trainer does not know which tokens were cut off; "
            "use rollout.top_k=0"
        )
    if rollout.max_tokens >= rollout.max_model_len:
        raise ConfigError(
            f"rollout.max_tokens ({rollout.max_tokens}) must be < rollout.max_model_len ({rollout.max_model_len}): "
            f"the prompt needs room too; use rollout.max_model_len={rollout.max_tokens + config.data.max_prompt_tokens}"
        )


def _check_parallel(config: RunConfig) -> None:
    sizes = config.trainer.parallel
    for key, names in (("tp x pp x cp", ("tp", "pp", "cp")), ("etp x ep x pp", ("etp", "ep", "pp"))):
        product = 1
        for name in names:
            product *= getattr(sizes, name)
        if sizes.world_size % product:
            raise ConfigError(
                f"trainer.parallel.world_size ({sizes.world_size}) must divide by {key} ({product}); "
                f"use trainer.parallel.world_size={_next_multiple(sizes.world_size, product)}"
            )
    for name in ("vpp", "cp"):
        if getattr(sizes, name) != 1:
            raise ConfigError(
                f"trainer.parallel.{name} ({getattr(sizes, name)}) must be 1: it is not supported yet; "
                f"use trainer.parallel.{name}=1"
            )


def _check_batch(config: RunConfig) -> None:
    dp = config.trainer.parallel.dp
    per_update = config.prompts_per_step * config.group_size // config.algorithm.updates_per_step
    if per_update % dp:
        raise ConfigError(
            f"prompts_per_step x group_size / updates_per_step ({per_update}) must divide by the data-parallel size "
            f"({dp}); use prompts_per_step={_next_multiple(config.prompts_per_step, dp)}"
        )
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    budget = config.trainer.max_tokens_per_micro_batch
    if min(longest, config.rollout.max_model_len) > budget:
        raise ConfigError(
            f"trainer.max_tokens_per_micro_batch ({budget}) must hold the longest sequence "
            f"({min(longest, config.rollout.max_model_len)} tokens); "
            f"use trainer.max_tokens_per_micro_batch={min(longest, config.rollout.max_model_len)}"
        )


def _check_engine(config: RunConfig) -> None:
    if config.rollout.expert_parallel:
        raise ConfigError(
            "rollout.expert_parallel (True) is not supported yet; use rollout.expert_parallel=false: "
            "experts are then split by rollout.tensor_parallel"
        )


def _next_multiple(value: int, factor: int) -> int:
    return -(-value // factor) * factor


def load(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read ``path``, apply ``key.path=value`` overrides and check everything.

    Raises:
        ConfigError: with the key, the rule, the value and a value that would work.
    """
    raw = _read_yaml(path)
    for override in overrides or []:
        _apply_override(raw, override)
    return from_dict(raw)


def from_dict(raw: dict[str, Any]) -> RunConfig:
    """A checked config from plain data; raises ConfigError like ``load``."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError(f"config file {path} does not exist; {_suggest(path.name, near, 'files there')}")
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"config file {path} must be a mapping of keys to values, found {type(raw).__name__}")
    return raw


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r} must have the form key.path=value, such as max_steps=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {key}: {text!r} is not a YAML value; quote text that holds : or [") from None
    if isinstance(value, str):
        value = _number_in(value)
    *parents, leaf = key.split(".")
    node = raw
    for depth, parent in enumerate(parents):
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {key}: {'.'.join(parents[: depth + 1])} is {child!r}, not a section")
        node = child
    node[leaf] = value


def _number_in(text: str) -> float | str:
    """YAML 1.1 reads ``1e-6`` as text; people mean a number."""
    try:
        return float(text)
    except ValueError:
        return text


def _explain(item: Any) -> str:
    """One pydantic error as: key (value) rule; way out."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key}; {_suggest(str(item['loc'][-1]), _keys_beside(item['loc']), 'keys here')}"
    if item["type"] == "missing":
        return f"{key} is required and missing; add it to the file or pass {key}=VALUE"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return f"{key} ({item['input']!r}): {item['msg'][0].lower()}{item['msg'][1:]}"


def _keys_beside(location: tuple[Any, ...]) -> list[str]:
    section: type[BaseModel] = RunConfig
    for part in location[:-1]:
        if isinstance(part, int):
            continue
        inner = section.model_fields[part].annotation
        if inner is not None and not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            inner = next((a for a in getattr(inner, "__args__", ()) if isinstance(a, type)), None)
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        section = inner
    return list(section.model_fields)


def _suggest(word: str, known: list[str], what: str) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"{what}: {', '.join(known)}" if known else f"there are no {what}"
