"""The run configuration: one frozen record per component, read top-down like the loop.

``load`` reads a YAML file, applies ``key.path=value`` overrides and refuses what cannot run, with the key, the
rule, the value and a value that would work. It starts nothing and imports neither torch nor Ray.

Bounds of one field stand at the field; a required field also has an example, which is offered to who forgets it. Rules
over several fields are the generators below RunConfig; those that need the model's files or the task are in
``preflight.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megarl.config_errors import ConfigError, Problem, Values, explain, shown, suggest, use

Lax = Field(strict=False)
"""YAML has no paths and no tuples: these come as text and as lists."""
FilePath = Annotated[Path, Lax]


class Section(BaseModel):
    """A frozen part of the config. Unknown keys, values of another type and numbers that are not finite are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


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

    task: str = Field(examples=["reasoning_gym/chain_sum"])
    """``reasoning_gym/<dataset>`` (procedural, with its own verifier) or ``jsonl`` (an own file)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task, such as the range of numbers of a reasoning-gym dataset."""
    path: FilePath | None = None
    """For ``jsonl``: a file with one ``{"prompt": ..., "answer": ...}`` per line."""
    eval_path: FilePath | None = None
    """For ``jsonl``: held-out problems in the same form."""
    system_prompt: str = ""
    """Put before every problem when not empty."""
    max_prompt_tokens: int = Field(512, ge=1)
    """A longer prompt is an error naming the prompt."""
    eval: EvalConfig = EvalConfig()


class RewardConfig(Section):
    """One part of the reward; the reward is the weighted sum."""

    name: str = Field(examples=["task"])
    """``task`` (the task's own verifier), ``exact_match``, or ``path/to/file.py:function``."""
    weight: float = 1.0


_TASK_REWARD = (RewardConfig(name="task"),)


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
    first_stage_layers: int | None = Field(None, ge=0)
    """Layers of the first pipeline stage, when it differs from the others; null is the even share."""
    last_stage_layers: int | None = Field(None, ge=0)
    """The same for the last stage."""
    pipeline_layout: str = ""
    """What every stage holds, as Megatron writes it: E the embedding, t a layer, L the loss, such as Ettt|tttt|tttL."""

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

    model: FilePath = Field(examples=[Path("examples/policies/tiny_moe")])
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
    """Every expert whole on one rank of an engine, instead of a part of it on each."""
    expert_placement: Literal["linear", "round_robin"] = "linear"
    """Which experts a rank has; round_robin needs a model that chooses among groups of experts."""
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

    transport: Literal["auto", "shm", "disk", "p2p"] = "auto"
    """How weights get to the engines: shared memory (auto), files below the run's folder, or process to process."""
    in_flight: Literal["wait", "abort", "keep"] = "wait"
    """Requests that run when new weights are put in place: waited for, ended as aborted, or continued with the new
    weights, their caches computed anew."""
    require_change: bool = True
    """Whether new weights that are exactly the old ones, after a step with a gradient, end the run."""
    probe_every: int = Field(1, ge=0)
    """Syncs between checks that the engine's log-probabilities on fixed prompts equal the trainer's; 0 never."""
    probe_tolerance: float = Field(1e-4, gt=0.0)
    """Largest allowed difference in fp32; bf16 is held to a mean of 0.25 instead."""


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
    last: bool = True
    """Whether the last step is saved; false for a trial on a machine without room for a checkpoint's copies."""
    keep: int = Field(2, ge=1)
    """Committed checkpoints kept."""


class SftConfig(Section):
    """Supervised warm start (``megarl sft``) on the task's own problems."""

    steps: int = Field(300, ge=1)
    batch_size: int = Field(256, ge=1)
    lr: float = Field(2e-3, gt=0.0)
    output: FilePath = Path("models/sft")
    """The folder that is written; it must not exist yet."""


class RunConfig(Section):
    """A whole run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", examples=["my-run"])
    """Names the run's folder and its record: letters, digits, ``.``, ``_`` and ``-``."""
    seed: int = Field(0, ge=0)
    max_steps: int = Field(ge=1, examples=[100])
    prompts_per_step: int = Field(ge=1, examples=[64])
    group_size: int = Field(ge=1, examples=[8])
    """Samples of every prompt."""
    max_staleness: int = Field(0, ge=0)
    """Steps a sample may lag behind the weights; 0 is strictly on-policy."""
    data: DataConfig
    rewards: Annotated[tuple[RewardConfig, ...], Lax] = _TASK_REWARD
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig
    rollout: RolloutConfig = RolloutConfig()
    placement: PlacementConfig = PlacementConfig()
    weights: WeightsConfig = WeightsConfig()
    tracking: TrackingConfig = TrackingConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    sft: SftConfig = SftConfig()
    output: FilePath = Path("runs")
    """Every run gets a folder of its name below."""

    @property
    def run_folder(self) -> Path:
        """Everything a run writes lies below."""
        return self.output / self.name

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest completion."""
        return self.data.max_prompt_tokens + self.rollout.max_tokens

    @model_validator(mode="after")
    def _check(self) -> Self:
        problem = next(problems(self), None)
        if problem:
            raise ConfigError(problem.text(lambda values: not any(problems(changed(self, values)))))
        return self


# --- rules over several fields ---------------------------------------------------------------------------------------


def problems(config: RunConfig) -> Iterator[Problem]:
    """The rules that ``config`` breaks; those after the first may speak of what the first broke."""
    yield from _parallel_problems(config.trainer.parallel)
    yield from _algorithm_problems(config)
    yield from _batch_problems(config)
    yield from _sampling_problems(config.rollout)
    yield from _length_problems(config)
    yield from _optimizer_problems(config.trainer.optimizer)


_S = TypeVar("_S", bound=Section)


def changed(section: _S, values: Values) -> _S:
    """``section`` with other values at dotted keys, unchecked."""
    for key, value in values.items():
        name, _, inner = key.partition(".")
        new = changed(getattr(section, name), {inner: value}) if inner else value
        section = section.model_copy(update={name: new})
    return section


def _parallel_problems(sizes: ParallelConfig) -> Iterator[Problem]:
    if sizes.cp != 1:
        yield Problem(
            "trainer.parallel.cp", sizes.cp, "must be 1: it is not supported yet", ({"trainer.parallel.cp": 1},)
        )
    if sizes.vpp != 1 and sizes.pp == 1:
        rule = "must be 1 without pipeline stages (trainer.parallel.pp is 1)"
        yield Problem("trainer.parallel.vpp", sizes.vpp, rule, ({"trainer.parallel.vpp": 1},))
    dense, expert = sizes.tp * sizes.pp * sizes.cp, sizes.etp * sizes.ep * sizes.pp
    for grid, product in (("tp x pp x cp", dense), ("etp x ep x pp", expert)):
        if sizes.world_size % product:
            both = math.lcm(dense, expert)
            fitting = range(_next_multiple(sizes.world_size, both), 0, -both)
            yield Problem(
                "trainer.parallel.world_size",
                sizes.world_size,
                f"must be a multiple of {grid} ({product}): every model-parallel group has as many ranks",
                tuple({"trainer.parallel.world_size": size} for size in fitting),
            )


def _algorithm_problems(config: RunConfig) -> Iterator[Problem]:
    name, size = config.algorithm.name, config.group_size
    if name != "reinforce" and size < 2:
        yield Problem(
            "group_size",
            size,
            f"must be >= 2 for algorithm.name {name}: advantages compare the samples of one prompt",
            ({"group_size": 8}, {"group_size": 2 * config.trainer.parallel.dp}, {"algorithm.name": "reinforce"}),
        )
    if not config.rewards:
        yield Problem("rewards", [], "must not be empty: every sample is worth something", ({"rewards": _TASK_REWARD},))


def _batch_problems(config: RunConfig) -> Iterator[Problem]:
    prompts, group = config.prompts_per_step, config.group_size
    updates, dp = config.algorithm.updates_per_step, config.trainer.parallel.dp
    fitting = ({"prompts_per_step": _next_multiple(prompts, updates * dp // math.gcd(dp, group))},)
    if prompts % updates:
        rule = f"must be a multiple of algorithm.updates_per_step ({updates}): every update takes as many prompts"
        yield Problem("prompts_per_step", prompts, rule, fitting)
    elif prompts // updates * group % dp:
        rule = (
            f"x group_size ({group}) / algorithm.updates_per_step ({updates}) must be a multiple of the data-parallel "
            f"size ({dp}): every rank takes as many sequences"
        )
        yield Problem("prompts_per_step", prompts, rule, fitting)


def _sampling_problems(rollout: RolloutConfig) -> Iterator[Problem]:
    unknown = "the trainer would not know which tokens were cut off"
    rules: tuple[tuple[bool, str, str, object], ...] = (
        (rollout.temperature <= 0, "temperature", "must be > 0: greedy samples of a prompt are all the same", 1.0),
        (rollout.top_p != 1.0, "top_p", f"must be 1.0: {unknown}", 1.0),
        (rollout.top_k != 0, "top_k", f"must be 0: {unknown}", 0),
    )
    for broken, name, rule, way_out in rules:
        if broken:
            yield Problem(f"rollout.{name}", getattr(rollout, name), rule, ({f"rollout.{name}": way_out},))


def _length_problems(config: RunConfig) -> Iterator[Problem]:
    longest = config.longest_sequence
    parts = (
        f"data.max_prompt_tokens ({config.data.max_prompt_tokens}) + rollout.max_tokens ({config.rollout.max_tokens})"
    )
    room = {"rollout.max_model_len": longest}
    budget = {"trainer.max_tokens_per_micro_batch": longest}
    if config.rollout.max_model_len < longest:
        yield Problem(
            "rollout.max_model_len",
            config.rollout.max_model_len,
            f"must be >= {parts}: the engine holds prompt and completion",
            (room, room | budget),
        )
    if config.trainer.max_tokens_per_micro_batch < longest:
        yield Problem(
            "trainer.max_tokens_per_micro_batch",
            config.trainer.max_tokens_per_micro_batch,
            f"must be >= {parts}: no sequence is cut",
            (budget,),
        )


def _optimizer_problems(optimizer: OptimizerConfig) -> Iterator[Problem]:
    if optimizer.min_lr > optimizer.lr:
        key = "trainer.optimizer.min_lr"
        yield Problem(key, optimizer.min_lr, f"must be <= trainer.optimizer.lr ({optimizer.lr:g})", ({key: 0.0},))


def _next_multiple(value: int, factor: int) -> int:
    return -(-value // factor) * factor


# --- reading ---------------------------------------------------------------------------------------------------------


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
        raise ConfigError(explain(error, RunConfig)) from None


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-6 is a number (as in YAML 1.2), and a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = sorted(p.name for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise ConfigError(f"config file {path} does not exist; {suggest(path.name, near, 'files there')}")
    try:
        raw = _parse_yaml(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path} must be valid YAML: {_one_line(error)}; mend the line") from None
    if not isinstance(raw, dict):
        raise ConfigError(
            f"config file {path} ({shown(raw)}) must be a mapping of keys to values; start from one in configs/"
        )
    return raw


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    *parents, leaf = key.split(".")
    if not sign or not all((*parents, leaf)):
        raise ConfigError(f"override ({override}) must have the form key.path=value; use one such as max_steps=10")
    try:
        value = _parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{key} ({text}) must be a YAML value: {_one_line(error)}; "
            f"use quotes around text, such as {key}='\"{text}\"'"
        ) from None
    node: Any = raw
    for depth, part in enumerate(parents):
        place = _place(node, part, parents[:depth], value)
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[place]
    node[_place(node, leaf, parents, value)] = value


def _place(node: object, part: str, above: list[str], value: object) -> str | int:
    """``part`` as a key or a number of ``node``, which stands at ``above``."""
    if isinstance(node, dict):
        return part
    key = ".".join(above)
    if not isinstance(node, list):
        raise ConfigError(f"{key} ({shown(node)}) must be a section, to have a key {part}; {use({key: value})}")
    if part.isdecimal() and int(part) < len(node):
        return int(part)
    raise ConfigError(f"{key} ({shown(node)}) must have an entry {part}; {use({key: node})} with one more")


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())
