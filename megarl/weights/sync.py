"""One weight sync: stage, prove, pause, install, agree, publish. Or leave every engine as it was.

trainer writes the shards        -> digest of what left the trainer
every engine rank reads them     -> the same digest, or the sync ends here and nothing was touched
pause, install on every rank     -> all ranks agree on version and digests, or all of them roll back
publish the version, resume      -> the fixed prompts get the trainer's log-probabilities, or the run ends
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from megarl.config import WeightsConfig
from megarl.interfaces import PolicyTrainer, RolloutEngine
from megarl.types import EngineStatus, Sample, SyncReport


class SyncFailed(RuntimeError):
    """A new version could not be proven. Engines serve the last proven one, unless the message says otherwise."""


class Clock(Protocol):
    """Seconds that only go forward."""

    def __call__(self) -> float: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Bytes:
    """Size of one sync, known from the plan before anything moves."""

    moved: int
    """Over all engines."""
    lower_bound: int
    """What the engine ranks must end up with."""


@dataclass(frozen=True, slots=True)
class ProbeRule:
    """When engine and trainer count as equal on the fixed prompts, from |difference| of all their log-probabilities.

    In fp32 the largest one decides, and a single update that did not arrive is seen. In bf16 single unlikely tokens
    differ by tenths, so there it is the mean, and only weights that are wrong altogether are seen: what proves a bf16
    sync are the checksums and the probe of the modules.
    """

    statistic: Literal["largest", "mean"]
    tolerance: float

    def value(self, differences: np.ndarray) -> float:
        """What is held against the tolerance."""
        return float(differences.max() if self.statistic == "largest" else differences.mean())


class BridgeSync:
    """A ``WeightSync`` over one trainer and the engines, which may be several replicas behind one Protocol."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        engine: RolloutEngine,
        config: WeightsConfig,
        *,
        plan_digest: str,
        size: Bytes,
        probe_sequences: Sequence[tuple[int, ...]],
        probe_rule: ProbeRule,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._trainer, self._engine, self._config = trainer, engine, config
        self._plan_digest, self._size = plan_digest, size
        self._probe_sequences, self._probe_rule = tuple(probe_sequences), probe_rule
        self._clock = clock
        self._syncs = 0

    async def sync(self, version: int) -> SyncReport:
        """Publish the trainer's weights as ``version``.

        Raises:
            SyncFailed: checksums, installation or log-probabilities are not right.
        """
        start = self._clock()
        content_digest = await self._trainer.stage_weights(version)
        self._require_agreement("staged", await self._engine.verify_staged(version), content_digest, version=None)
        staged = self._clock()
        await self._engine.pause()
        paused = self._clock()
        await self._install(version, content_digest)
        installed = self._clock()
        await self._engine.resume(version)
        resumed = self._clock()
        difference = await self._probe(version) if self._probe_is_due() else None
        self._syncs += 1
        return SyncReport(
            version=version,
            bytes_moved=self._size.moved,
            lower_bound_bytes=self._size.lower_bound,
            stage_s=staged - start,
            install_s=installed - paused,
            pause_s=resumed - staged,
            probe_max_diff=difference,
        )

    async def _install(self, version: int, content_digest: str) -> None:
        statuses = await self._engine.install(version)
        try:
            self._require_agreement("installed", statuses, content_digest, version=version)
        except SyncFailed:
            restored = await self._engine.rollback()
            versions = {status.version for status in restored}
            if len(versions) == 1 and not any(status.error for status in restored):
                await self._engine.resume(versions.pop())  # else it stays paused: it must not serve a mixture
            raise

    def _require_agreement(
        self, what: str, statuses: Sequence[EngineStatus], content_digest: str, *, version: int | None
    ) -> None:
        for rank, status in enumerate(statuses):
            if status.error:
                raise SyncFailed(f"engine rank {rank} could not be {what}: {status.error}")
            if status.plan_digest != self._plan_digest:
                raise SyncFailed(f"engine rank {rank} follows plan {status.plan_digest}, not {self._plan_digest}")
            if status.content_digest != content_digest:
                raise SyncFailed(
                    f"engine rank {rank} has {what} content {status.content_digest}, the trainer wrote {content_digest}"
                )
            if version is not None and status.version != version:
                raise SyncFailed(f"engine rank {rank} {what} version {status.version}, not {version}")

    def _probe_is_due(self) -> bool:
        return bool(self._config.probe_every and self._syncs % self._config.probe_every == 0)

    async def _probe(self, version: int) -> float:
        """Largest difference between engine and trainer on the fixed prompts."""
        engine, trainer = await asyncio.gather(
            self._engine.score(self._probe_sequences),
            self._trainer.score(_as_samples(self._probe_sequences), temperature=1.0),
        )
        pairs = zip(trainer, engine, strict=True)
        differences = np.abs(np.concatenate([np.asarray(ours[1:]) - np.asarray(theirs) for ours, theirs in pairs]))
        value, rule = self._probe_rule.value(differences), self._probe_rule
        if not value <= rule.tolerance:
            raise SyncFailed(
                f"version {version}: on fixed prompts the {rule.statistic} difference of engine and trainer "
                f"log-probabilities is {value:.2e}, allowed {rule.tolerance:.0e} (weights.probe_tolerance in fp32)"
            )
        return float(differences.max())


def _as_samples(sequences: Sequence[tuple[int, ...]]) -> list[Sample]:
    return [
        Sample(
            token_ids=np.asarray(ids, dtype=np.int32),
            loss_mask=np.zeros(len(ids), dtype=bool),
            rollout_logprobs=np.zeros(len(ids), dtype=np.float32),
            group=number,
            version=0,
            reward=None,
        )
        for number, ids in enumerate(sequences)
    ]
