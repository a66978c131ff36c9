"""What travels: the records every part of megarl exchanges.

Arrays are numpy, so that records cross process borders without a copy and this file needs no torch.
Token arrays are int32, masks bool, log-probabilities and weights float32.

    Prompt -> Trajectory(Turn ...) -> TrajectoryGroup -> Sample -> MicroBatch -> TrainBatch
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypedDict

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
TrajectoryStatus = Literal["finished", "truncated", "invalid"]


class Message(TypedDict):
    """One chat message, in the form chat templates expect."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. ``number`` counts prompts over the whole training stream and names the group.

    Example: ``Prompt(17, ({"role": "user", "content": "7 + 5 = ?"},), "12", "single_turn")``
    """

    number: int
    messages: tuple[Message, ...]
    target: str
    """What the verifier needs: a gold answer, or the verifier's own record as JSON text."""
    env: str = "single_turn"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to sample. The same (prompt_ids, seed, weights) gives the same completion.

    Example: ``GenerateRequest((1, 5, 9), seed=812, max_tokens=16, temperature=1.0)``
    """

    prompt_ids: tuple[int, ...]
    seed: int | None
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What the engine sampled for one request, token for token.

    Example: ``Turn((1, 5), (7, 2), (-0.1, -0.02), version=3, finish_reason="stop")``
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    """Natural log, one per completion token, of the distribution that was sampled from."""
    version: int
    """The oldest weight version that sampled a token of this turn."""
    finish_reason: FinishReason
    version_spans: tuple[tuple[int, int], ...] = ()
    """(version, number of completion tokens it sampled) in order; empty when all are of ``version``."""


@dataclass(slots=True)
class Trajectory:
    """One attempt at a prompt. ``reward`` is None when it could not be computed: never a 0."""

    prompt: Prompt
    turns: list[Turn]
    text: str
    """The last completion, decoded, special tokens removed. For people and verifiers only."""
    status: TrajectoryStatus
    reward: float | None = None
    reward_parts: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The ``group_size`` attempts at one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(slots=True)
class Sample:
    """One trained sequence of L tokens. Index i of every array speaks of token i.

    ``loss_mask[i]`` says that the model sampled token i; only such tokens carry loss, KL and statistics.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    """0 where ``loss_mask`` is false."""
    group: int
    version: int
    reward: float | None
    truncated: bool = False
    advantage: float = 0.0
    in_loss: bool = True
    """False takes the sample out of the loss and of every denominator."""
    old_logprobs: np.ndarray | None = None
    """Of the trainer before the update; None lets the loss use the current ones, detached."""
    ref_logprobs: np.ndarray | None = None

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return int(self.loss_mask.sum()) if self.in_loss else 0


@dataclass(slots=True)
class MicroBatch:
    """Packed sequences: T positions, segment n is ``[cu_seqlens[n], cu_seqlens[n + 1])``.

    Position t predicts ``labels[t]``, the next token of the same segment; every per-token array below
    is shifted the same way, so index t speaks of ``labels[t]``.
    """

    tokens: np.ndarray
    positions: np.ndarray
    """Position inside the segment, from 0."""
    labels: np.ndarray
    """IGNORE_LABEL at the last position of a segment and on padding."""
    cu_seqlens: np.ndarray
    loss_weights: np.ndarray
    """The loss is ``sum(loss_weights * token_loss)``: every denominator is already in here."""
    advantages: np.ndarray
    rollout_logprobs: np.ndarray
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None

    @property
    def loss_mask(self) -> np.ndarray:
        """[T] bool, the positions that carry loss."""
        mask: np.ndarray = self.loss_weights != 0
        return mask


IGNORE_LABEL = -100


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One optimizer step: equally many micro-batches for every data-parallel rank."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """[dp rank][micro-batch]"""
    num_loss_tokens: int
    """Over all ranks and micro-batches, counted before any backward."""


@dataclass(slots=True)
class LoopState:
    """Where the loop stands. ``step`` is also the version of the weights."""

    step: int = 0
    prompts_done: int = 0
    tracker_run: str = ""
    """The tracker's own run id, so that a resumed run goes on in the same record."""

    def advance(self, groups: list[TrajectoryGroup]) -> None:
        """Count one finished step over ``groups``."""
        self.step += 1
        self.prompts_done += len(groups)


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What one optimizer step reports; every value is already reduced over all ranks."""

    values: dict[str, float]
    skipped: bool = False
    """True when the batch was empty or the gradient not finite; the weights are untouched."""

    @property
    def moved(self) -> bool:
        """Whether the step must have changed weights: it had a gradient and a learning rate."""
        return not self.skipped and self.values.get("grad_norm", 0.0) > 0.0 and self.values.get("lr", 0.0) > 0.0


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """What the trainer sent in one sync."""

    content_digests: tuple[str, ...]
    """One per engine rank of the plan."""
    num_bytes: int
    """As counted by the ranks that sent them."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What one engine rank serves. All ranks of an engine must agree before it resumes."""

    version: int
    plan_digest: str
    content_digest: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One weight sync, as measured. Sizes in bytes, durations in seconds."""

    version: int
    bytes_moved: int
    """As counted by the ranks that sent them."""
    lower_bound_bytes: int
    """What the engine ranks must end up with, less their padding."""
    stage_s: float
    """From the first byte written to the last one checked, while the engines generate."""
    install_s: float
    pause_s: float
    """The only time in which the engines do not generate."""
    fallback_bytes: int = 0
    """Bytes that went as whole tensors instead of shard to shard."""
    probe_max_diff: float | None = None
    """Largest |engine - trainer| log-probability on the fixed prompts; None when not probed."""

    @property
    def bytes_ratio(self) -> float:
        """Bytes moved by the lower bound."""
        return self.bytes_moved / max(self.lower_bound_bytes, 1)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes by the time of staging and installing."""
        return self.bytes_moved / 1e9 / max(self.stage_s + self.install_s, 1e-9)

    @property
    def text(self) -> str:
        """Example: ``version 3: 1.5 MB, 1.00 of the bound, 0 of them whole tensors; staged in ...``."""
        probe = "" if self.probe_max_diff is None else f"; fixed prompts differ by {self.probe_max_diff:.1e}"
        return (
            f"version {self.version}: {self.bytes_moved / 1e6:,.1f} MB, {self.bytes_ratio:.2f} of the bound, "
            f"{self.fallback_bytes} of them whole tensors; staged in {self.stage_s:.3f} s, installed in "
            f"{self.install_s:.3f} s, paused for {self.pause_s:.3f} s, {self.gb_per_s:.2f} GB/s{probe}"
        )


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Held-out accuracy at one weight version."""

    version: int
    accuracy: float
    num_prompts: int
    mean_completion_tokens: float
