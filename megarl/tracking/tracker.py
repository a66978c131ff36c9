"""The name of every metric, and where its value comes from. Names are added, never renamed (docs/metrics.md)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.types import EvalReport, Sample, SyncReport, Trajectory, TrajectoryGroup, UpdateMetrics

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a metric says. Example: ``Meaning("s", "lower", "One whole step.")``."""

    unit: str
    better: Better
    text: str


METRICS: dict[str, Meaning] = {
    "reward/mean": Meaning("", "higher", "Over all trajectories whose reward could be computed."),
    "reward/std": Meaning("", "neither", "Standard deviation (ddof 0) over the same trajectories."),
    "reward/verifier_error": Meaning("trajectories", "lower", "Reward none or not finite: out of the loss."),
    "reward_part/*": Meaning("", "higher", "Mean of one part of the reward, unweighted, by its name."),
    "groups/zero_spread": Meaning("share", "lower", "Groups whose rewards are all equal: nothing to learn from."),
    "samples/invalid": Meaning("trajectories", "lower", "Not usable, such as one without all log-probabilities."),
    "samples/skipped": Meaning("samples", "lower", "Valid, but taken out of the loss."),
    "staleness/mean": Meaning("steps", "lower", "Version trained on minus the oldest that sampled a token."),
    "staleness/max": Meaning("steps", "lower", "The same, of the stalest sample."),
    "tokens/prompt_mean": Meaning("tokens", "neither", "Prompt of the first turn."),
    "tokens/completion_mean": Meaning("tokens", "neither", "Sampled tokens of a trajectory, all turns."),
    "tokens/completion_max": Meaning("tokens", "neither", "The longest."),
    "tokens/truncated_share": Meaning("share", "lower", "Trajectories cut at the token limit."),
    "tokens/loss": Meaning("tokens", "neither", "Tokens that carried loss."),
    "tokens_per_s": Meaning("tokens/s", "higher", "Sampled tokens over the whole time of the step."),
    "updates/skipped": Meaning("updates", "lower", "Steps not made: an empty batch, a gradient not finite."),
    "policy/loss": Meaning("", "neither", "The objective; its size says nothing across settings."),
    "policy/grad_norm": Meaning("", "neither", "Global gradient norm before clipping."),
    "policy/lr": Meaning("", "neither", "Learning rate of the last update of the step."),
    "policy/mismatch_kl": Meaning("nats", "lower", "KL, trainer against engine, on the sampled tokens (k3)."),
    "policy/mismatch_abs_diff": Meaning("nats", "lower", "Mean |trainer - engine| log-probability of those tokens."),
    "policy/entropy": Meaning("nats", "neither", "Of the next-token distribution."),
    "policy/ratio": Meaning("", "neither", "Probability after over before the update; 1 with one update a step."),
    "policy/clip_low_share": Meaning("share", "neither", "Loss tokens held at 1 - clip_low."),
    "policy/clip_high_share": Meaning("share", "neither", "Loss tokens held at 1 + clip_high."),
    "policy/importance": Meaning("", "neither", "Trainer over engine probability of the tokens, capped; about 1."),
    "policy/importance_capped_share": Meaning("share", "lower", "Tokens whose trainer/engine weight met the cap."),
    "policy/kl_to_old": Meaning("nats", "neither", "KL against the policy before the update (k3)."),
    "policy/kl_to_ref": Meaning("nats", "neither", "KL against the frozen reference (k3); 0 without a penalty."),
    "sync/bytes_moved": Meaning("bytes", "lower", "Sent to engines by the weight sync, as counted by the senders."),
    "sync/lower_bound_bytes": Meaning("bytes", "neither", "The least that any sync would have to move."),
    "sync/bytes_ratio": Meaning("1", "lower", "Bytes moved by the lower bound."),
    "sync/fallback_bytes": Meaning("bytes", "lower", "Of these, sent as whole tensors instead of shard to shard."),
    "sync/gb_per_s": Meaning("GB/s", "higher", "Bytes moved by the time of staging and installing, 10^9 bytes."),
    "sync/stage_s": Meaning("s", "lower", "Sending the shards and checking them, while engines generate."),
    "sync/install_s": Meaning("s", "lower", "Putting them in place."),
    "sync/pause_s": Meaning("s", "lower", "Engines not generating."),
    "sync/probe_max_diff": Meaning("nats", "lower", "Largest |engine - trainer| log-probability on fixed prompts."),
    "time/step_s": Meaning("s", "lower", "The whole step."),
    "time/generate_s": Meaning("s", "lower", "Waiting for rollouts."),
    "time/score_s": Meaning("s", "lower", "Advantages, and old and reference log-probabilities."),
    "time/train_s": Meaning("s", "lower", "Packing and optimizer steps."),
    "time/sync_s": Meaning("s", "lower", "The weight sync."),
    "time/evaluate_s": Meaning("s", "lower", "The evaluation after the step before."),
    "time/save_s": Meaning("s", "lower", "The checkpoint after the step before."),
    "time/overhead_s": Meaning("s", "lower", "What no phase covers."),
    "eval/accuracy": Meaning("share", "higher", "Held-out problems solved."),
    "eval/prompts": Meaning("prompts", "neither", "Held-out problems asked."),
    "eval/completion_tokens_mean": Meaning("tokens", "neither", "Length of the held-out answers."),
}
"""By name; a name that ends in ``*`` stands for a family."""


def better(name: str) -> Better:
    """Which way metric ``name`` improves; ``neither`` where it does not, or is not known here."""
    family = f"{name.partition('/')[0]}/*"
    meaning = METRICS.get(name) or METRICS.get(family)
    return meaning.better if meaning else "neither"


def step_metrics(
    groups: Sequence[TrajectoryGroup],
    samples: Sequence[Sample],
    updates: Sequence[UpdateMetrics],
    report: SyncReport,
    times: Mapping[str, float],
) -> dict[str, float]:
    """Every metric of one finished step; what had nothing to measure is left out, never 0.

    ``report`` is of the sync after the updates, so ``report.version - 1`` are the weights that were trained on;
    ``times`` is what ``StepTimer.lap`` returns.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    sampled = sum(map(_sampled_tokens, trajectories))
    return {
        **_reward_metrics(trajectories),
        **_group_metrics(groups),
        **_token_metrics(trajectories),
        **_sample_metrics(samples, trained_version=report.version - 1),
        **_update_metrics(updates),
        **_sync_metrics(report),
        **times,
        "tokens_per_s": sampled / times["time/step_s"],
    }


def eval_metrics(report: EvalReport) -> dict[str, float]:
    """The metrics of one held-out evaluation."""
    return {
        "eval/accuracy": report.accuracy,
        "eval/prompts": float(report.num_prompts),
        "eval/completion_tokens_mean": report.mean_completion_tokens,
    }


def _reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [t.reward for t in trajectories if t.reward is not None and math.isfinite(t.reward)]
    metrics = {"reward/verifier_error": float(len(trajectories) - len(rewards))}
    if rewards:
        metrics["reward/mean"] = statistics.fmean(rewards)
        metrics["reward/std"] = statistics.pstdev(rewards)
    parts: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            if value is not None and math.isfinite(value):
                parts.setdefault(name, []).append(value)
    return metrics | {f"reward_part/{name}": statistics.fmean(values) for name, values in parts.items()}


def _group_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    flat = 0
    for group in groups:
        rewards = {t.reward for t in group.trajectories if t.reward is not None and math.isfinite(t.reward)}
        flat += len(rewards) <= 1
    return _averages({"groups/zero_spread": (flat, len(groups))})


def _token_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    lengths = [_sampled_tokens(t) for t in trajectories]
    metrics = _averages(
        {
            "tokens/prompt_mean": (sum(len(t.turns[0].prompt_ids) for t in trajectories if t.turns), len(lengths)),
            "tokens/completion_mean": (sum(lengths), len(lengths)),
            "tokens/truncated_share": (sum(t.status == "truncated" for t in trajectories), len(lengths)),
        }
    )
    metrics["tokens/completion_max"] = float(max(lengths, default=0))
    metrics["samples/invalid"] = float(sum(t.status == "invalid" for t in trajectories))
    return metrics


def _sample_metrics(samples: Sequence[Sample], *, trained_version: int) -> dict[str, float]:
    metrics = {
        "samples/skipped": float(sum(not sample.in_loss for sample in samples)),
        "tokens/loss": float(sum(sample.num_loss_tokens for sample in samples)),
    }
    if samples:
        lags = [trained_version - sample.version for sample in samples]
        metrics |= {"staleness/mean": statistics.fmean(lags), "staleness/max": float(max(lags))}
    return metrics


def _update_metrics(updates: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Means over the updates that were made; the learning rate is the last one's."""
    made = [update.values for update in updates if not update.skipped]
    names = dict.fromkeys(name for values in made for name in values)
    metrics = {f"policy/{name}": statistics.fmean(v[name] for v in made if name in v) for name in names}
    if made and "lr" in made[-1]:
        metrics["policy/lr"] = made[-1]["lr"]
    return metrics | {"updates/skipped": float(len(updates) - len(made))}


def _sync_metrics(report: SyncReport) -> dict[str, float]:
    metrics = {
        "sync/bytes_moved": float(report.bytes_moved),
        "sync/lower_bound_bytes": float(report.lower_bound_bytes),
        "sync/bytes_ratio": report.bytes_ratio,
        "sync/fallback_bytes": float(report.fallback_bytes),
        "sync/gb_per_s": report.gb_per_s,
        "sync/stage_s": report.stage_s,
        "sync/install_s": report.install_s,
        "sync/pause_s": report.pause_s,
    }
    return metrics if report.probe_max_diff is None else metrics | {"sync/probe_max_diff": report.probe_max_diff}


def _averages(pairs: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Sum over count by name, without the names that counted nothing."""
    return {name: total / count for name, (total, count) in pairs.items() if count}


def _sampled_tokens(trajectory: Trajectory) -> int:
    return sum(len(turn.completion_ids) for turn in trajectory.turns)
