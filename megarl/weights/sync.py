"""One weight sync: stage, prove, pause, install, agree, publish. Or leave every engine as it was.

trainer sends the shards         -> digests of what left the trainer, one per engine rank
every engine rank receives them  -> the same digests, or the sync ends here and nothing was touched
pause, install on every rank     -> all ranks agree on version, plan and content, or all of them roll back
publish the version, resume      -> the fixed prompts get the trainer's log-probabilities, or the run ends
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from megarl.config import WeightsConfig
from megarl.interfaces import PolicyTrainer, RolloutEngine
from megarl.types import EngineStatus, Sample, SyncReport

_log = logging.getLogger(__name__)


class SyncFailed(RuntimeError):
    """A new version could not be proven. Engines serve the last proven one, unless the message says otherwise."""


class Clock(Protocol):
    """Seconds that only go forward."""

    def __call__(self) -> float: ...  # noqa: D102


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
        lower_bound_bytes: int,
        probe_sequences: Sequence[tuple[int, ...]],
        probe_rule: ProbeRule,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._trainer, self._engine, self._config = trainer, engine, config
        self._plan_digest, self._lower_bound_bytes = plan_digest, lower_bound_bytes
        self._probe_sequences, self._probe_rule = tuple(probe_sequences), probe_rule
        self._clock = clock
        self._syncs = 0
        self._published: tuple[str, ...] | None = None

    async def sync(self, version: int, *, expect_change: bool = False) -> SyncReport:
        """Publish the trainer's weights as ``version``.

        Raises:
            SyncFailed: checksums, installation or log-probabilities are not right, or nothing changed that should have.
        """
        start = self._clock()
        staged, statuses = await asyncio.gather(self._trainer.stage_weights(version), self._engine.receive(version))
        self._require_agreement("staged", statuses, staged.content_digests, version=None)
        self._require_change(staged.content_digests, version, expect_change=expect_change)
        received = self._clock()
        await self._engine.pause()
        paused = self._clock()
        await self._install(version, staged.content_digests)
        installed = self._clock()
        await self._engine.resume(version)
        resumed = self._clock()
        self._published = staged.content_digests
        difference = await self._probe(version) if self._probe_is_due() else None
        self._syncs += 1
        report = SyncReport(
            version=version,
            bytes_moved=staged.num_bytes,
            lower_bound_bytes=self._lower_bound_bytes,
            stage_s=received - start,
            install_s=installed - paused,
            pause_s=resumed - received,
            probe_max_diff=difference,
        )
        _log.info("%s", report.text)
        return report

    def _require_change(self, digests: tuple[str, ...], version: int, *, expect_change: bool) -> None:
        if expect_change and self._config.require_change and digests == self._published:
            raise SyncFailed(
                f"version {version} has exactly the weights of the version before, though an optimizer step with a "
                "gradient was taken: an update was lost, or it is too small for the engine's number format "
                "(raise trainer.optimizer.lr, or set weights.require_change=false)"
            )

    async def _install(self, version: int, digests: tuple[str, ...]) -> None:
        statuses = await self._engine.install(version)
        try:
            self._require_agreement("installed", statuses, digests, version=version)
        except SyncFailed:
            restored = await self._engine.rollback()
            versions = {status.version for status in restored}
            if len(versions) == 1 and not any(status.error for status in restored):
                await self._engine.resume(versions.pop())  # else it stays paused: it must not serve a mixture
            raise

    def _require_agreement(
        self, what: str, statuses: Sequence[EngineStatus], digests: tuple[str, ...], *, version: int | None
    ) -> None:
        for rank, status in enumerate(statuses):
            digest = digests[rank % len(digests)]  # replicas that read the same memory share the plan's ranks
            if status.error:
                raise SyncFailed(f"engine rank {rank} could not be {what}: {status.error}")
            if status.plan_digest != self._plan_digest:
                raise SyncFailed(f"engine rank {rank} follows plan {status.plan_digest}, not {self._plan_digest}")
            if status.content_digest != digest:
                raise SyncFailed(
                    f"engine rank {rank} has {what} content {status.content_digest}, the trainer sent {digest}"
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
