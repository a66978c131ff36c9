"""Packing: samples to micro-batches of bounded length, equally many for every data-parallel rank.

Every denominator of the loss is counted here, over the whole optimizer step and before anything is computed, and goes
into ``loss_weights``. So the loss is one sum, and does not depend on how the step was cut into micro-batches or spread
over ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config import RunConfig, TrainerConfig
from megarl.types import IGNORE_LABEL, MicroBatch, Sample, TrainBatch

Bins = list[list[list[int]]]
"""[dp rank][micro-batch] -> numbers of samples"""


def pack(samples: Sequence[Sample], config: RunConfig, *, dp_size: int) -> list[TrainBatch]:
    """One batch per optimizer step; each takes an equal share of the groups, in order."""
    batches = []
    for share in _shares_of_groups(samples, config.algorithm.updates_per_step):
        weights = loss_weights(share, config.algorithm.loss, config.rollout.max_tokens)
        batches.append(pack_one(share, weights, config.trainer, dp_size=dp_size))
    return batches


def pack_one(
    samples: Sequence[Sample], weights: Sequence[float], trainer: TrainerConfig, *, dp_size: int
) -> TrainBatch:
    """All ``samples`` that carry loss as one optimizer step; ``weights`` is the loss weight of each one's tokens."""
    kept = [number for number, sample in enumerate(samples) if sample.num_loss_tokens]
    chosen, chosen_weights = [samples[n] for n in kept], [weights[n] for n in kept]
    bins = _distribute([len(s.token_ids) for s in chosen], trainer, dp_size)
    micro_batches = _micro_batches(chosen, chosen_weights, bins, trainer)
    return TrainBatch(micro_batches, num_loss_tokens=sum(s.num_loss_tokens for s in chosen))


@dataclass(frozen=True, slots=True)
class ScoringPack:
    """Micro-batches for a forward pass, and the way back to samples."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    bins: Bins
    lengths: tuple[int, ...]

    def unpack(self, scores: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """From [T] per dp rank and micro-batch (index t speaks of the next token) to [L] per sample, 0 at token 0."""
        found = [np.zeros(length, dtype=np.float32) for length in self.lengths]
        for rank, rank_bins in enumerate(self.bins):
            for number, members in enumerate(rank_bins):
                start = 0
                for sample in members:
                    length = self.lengths[sample]
                    found[sample][1:] = scores[rank][number][start : start + length - 1]
                    start += length
        return found


def pack_for_scoring(samples: Sequence[Sample], trainer: TrainerConfig, *, dp_size: int) -> ScoringPack:
    """All ``samples``, whether they carry loss or not."""
    lengths = [len(sample.token_ids) for sample in samples]
    bins = _distribute(lengths, trainer, dp_size)
    micro_batches = _micro_batches(samples, [0.0] * len(samples), bins, trainer)
    return ScoringPack(micro_batches, bins, tuple(lengths))


def loss_weights(samples: Sequence[Sample], mode: str, max_tokens: int) -> list[float]:
    """The weight of each loss token of each sample; one without loss tokens has weight 0 and no part in denominators.

    token_mean 1 / all tokens; sequence_mean_token_mean 1 / (sequences x own tokens); sequence_mean_token_sum
    1 / sequences; constant 1 / (sequences x max_tokens), Dr.GRPO (arXiv:2503.20783).
    """
    counts = [sample.num_loss_tokens for sample in samples]
    tokens, sequences = sum(counts), sum(count > 0 for count in counts)
    denominators: dict[str, Callable[[int], int]] = {
        "token_mean": lambda count: tokens,
        "sequence_mean_token_mean": lambda count: sequences * count,
        "sequence_mean_token_sum": lambda count: sequences,
        "constant": lambda count: sequences * max_tokens,
    }
    return [1.0 / denominators[mode](count) if count else 0.0 for count in counts]


def _shares_of_groups(samples: Sequence[Sample], shares: int) -> list[list[Sample]]:
    groups = sorted({sample.group for sample in samples})
    share_of = {group: place * shares // len(groups) for place, group in enumerate(groups)}
    found: list[list[Sample]] = [[] for _ in range(shares)]
    for sample in samples:
        found[share_of[sample.group]].append(sample)
    return found


def _distribute(lengths: Sequence[int], trainer: TrainerConfig, dp_size: int) -> Bins:
    """Samples over ranks and micro-batches: as few as the budget allows, balanced by tokens, longest first.

    Every rank gets as many micro-batches; with interleaved pipelines a multiple of the stages, as Megatron's schedule
    wants. Ties go to the lower number, so the result repeats.
    """
    budget, sizes = trainer.max_tokens_per_micro_batch, trainer.parallel
    step = dp_size * (sizes.pp if sizes.vpp > 1 else 1)
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    count = max(1, -(-sum(lengths) // budget))
    while True:
        count = -(-count // step) * step
        bins = _balance(order, lengths, count)
        if all(sum(lengths[n] for n in bin) <= budget or len(bin) == 1 for bin in bins):
            break
        count += step
    per_rank = count // dp_size
    return [[sorted(bins[rank * per_rank + m]) for m in range(per_rank)] for rank in range(dp_size)]


def _balance(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Each next sample into the emptiest of ``count`` bins."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for sample in order:
        filled, emptiest = heapq.heappop(heap)
        bins[emptiest].append(sample)
        heapq.heappush(heap, (filled + lengths[sample], emptiest))
    return bins


def _micro_batches(
    samples: Sequence[Sample], weights: Sequence[float], bins: Bins, trainer: TrainerConfig
) -> tuple[tuple[MicroBatch, ...], ...]:
    return tuple(
        tuple(_micro_batch([samples[n] for n in bin], [weights[n] for n in bin], trainer.parallel.tp) for bin in rank)
        for rank in bins
    )


def _micro_batch(samples: Sequence[Sample], weights: Sequence[float], multiple: int) -> MicroBatch:
    """``samples`` one after the other, then a segment of padding up to a multiple of ``multiple``.

    Without samples it is all padding: a rank then takes part in every collective with weight 0.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    padding = -sum(lengths) % multiple if lengths else multiple
    segments = [*lengths, padding] if padding else lengths
    weight_parts = [w * s.loss_mask for s, w in zip(samples, weights, strict=True)]
    return MicroBatch(
        tokens=_join([s.token_ids for s in samples], padding, np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in segments]),
        labels=_shifted([s.token_ids for s in samples], padding, np.int32, IGNORE_LABEL),
        cu_seqlens=np.concatenate([[0], np.cumsum(segments)]).astype(np.int32),
        loss_weights=_shifted(weight_parts, padding, np.float32, 0),
        advantages=_shifted(
            [np.full(n, s.advantage) for s, n in zip(samples, lengths, strict=True)], padding, np.float32, 0
        ),
        rollout_logprobs=_shifted([s.rollout_logprobs for s in samples], padding, np.float32, 0),
        old_logprobs=_optional([s.old_logprobs for s in samples], padding),
        ref_logprobs=_optional([s.ref_logprobs for s in samples], padding),
    )


def _optional(parts: Sequence[np.ndarray | None], padding: int) -> np.ndarray | None:
    """Shifted, or None; samples of one step were scored together or not at all."""
    known = [part for part in parts if part is not None]
    assert len(known) in (0, len(parts)), f"{len(known)} of {len(parts)} samples of one micro-batch were scored"
    return _shifted(known, padding, np.float32, 0) if known else None


def _join(parts: Sequence[np.ndarray], padding: int, dtype: type) -> np.ndarray:
    joined: np.ndarray = np.concatenate([*parts, np.zeros(padding)]).astype(dtype)
    return joined


def _shifted(parts: Sequence[np.ndarray], padding: int, dtype: type, fill: int) -> np.ndarray:
    """Index t speaks of the token after t; the last position of every segment has nothing after it."""
    moved = [np.append(part[1:], fill) for part in parts]
    joined: np.ndarray = np.concatenate([*moved, np.full(padding, fill)]).astype(dtype)
    return joined
