"""The sync publishes a version on every engine rank or leaves all of them as they were."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from megarl.config import WeightsConfig
from megarl.types import EngineStatus, StagedWeights
from megarl.weights.sync import BridgeSync, ProbeRule, SyncFailed

PLAN, CONTENT = "plan", "content"


@dataclass
class Trainer:
    """Log-probabilities of -1 everywhere."""

    content: str = CONTENT

    async def stage_weights(self, version: int) -> StagedWeights:
        return StagedWeights((self.content,), 10)

    async def score(self, samples, *, temperature=None, reference=False):
        assert temperature == 1.0
        return [np.full(len(sample.token_ids), -1.0, dtype=np.float32) for sample in samples]


@dataclass
class Engine:
    """Two ranks that do as they are told, except for what a test plants."""

    staged: list[EngineStatus] | None = None
    installed: list[EngineStatus] | None = None
    restored: list[EngineStatus] | None = None
    logprob: float = -1.0
    calls: list[str] = field(default_factory=list)
    version: int = 0

    def _ranks(self, version: int) -> list[EngineStatus]:
        return [EngineStatus(version, PLAN, CONTENT)] * 2

    async def receive(self, version: int) -> list[EngineStatus]:
        self.calls.append("receive")
        return self.staged or self._ranks(version)

    async def pause(self) -> None:
        self.calls.append("pause")

    async def install(self, version: int) -> list[EngineStatus]:
        self.calls.append("install")
        return self.installed or self._ranks(version)

    async def rollback(self) -> list[EngineStatus]:
        self.calls.append("rollback")
        return self.restored or self._ranks(self.version)

    async def resume(self, version: int) -> None:
        self.calls.append(f"resume {version}")
        self.version = version

    async def score(self, sequences):
        return [[self.logprob] * (len(sequence) - 1) for sequence in sequences]


def _sync(engine: Engine, **config) -> BridgeSync:
    return BridgeSync(
        Trainer(),
        engine,
        WeightsConfig(**config),
        plan_digest=PLAN,
        lower_bound_bytes=10,
        probe_sequences=[(1, 2, 3), (4, 5)],
        probe_rule=ProbeRule("largest", 1e-4),
    )


async def test_a_version_is_verified_before_the_pause_and_published_after_all_ranks_agree() -> None:
    engine = Engine()
    report = await _sync(engine).sync(7)
    assert engine.calls == ["receive", "pause", "install", "resume 7"]
    assert (report.version, report.bytes_moved, report.probe_max_diff) == (7, 10, 0.0)


@pytest.mark.parametrize(
    "planted",
    [
        EngineStatus(7, PLAN, "other"),
        EngineStatus(7, "other", CONTENT),
        EngineStatus(7, PLAN, CONTENT, error="checksum of w13 differs"),
    ],
)
async def test_what_cannot_be_verified_never_touches_an_engine(planted: EngineStatus) -> None:
    engine = Engine(staged=[EngineStatus(7, PLAN, CONTENT), planted])
    with pytest.raises(SyncFailed, match="engine rank 1"):
        await _sync(engine).sync(7)
    assert engine.calls == ["receive"]


@pytest.mark.parametrize(
    "planted", [EngineStatus(6, PLAN, CONTENT), EngineStatus(0, PLAN, "", error="WeightMismatch: lm_head")]
)
async def test_one_rank_that_fails_rolls_all_of_them_back_to_the_old_version(planted: EngineStatus) -> None:
    engine = Engine(installed=[EngineStatus(7, PLAN, CONTENT), planted], version=6)
    with pytest.raises(SyncFailed, match="engine rank 1"):
        await _sync(engine).sync(7)
    assert engine.calls == ["receive", "pause", "install", "rollback", "resume 6"]


@pytest.mark.parametrize(
    "restored",
    [
        [EngineStatus(6, PLAN, CONTENT), EngineStatus(5, PLAN, CONTENT)],
        [EngineStatus(6, PLAN, CONTENT), EngineStatus(6, PLAN, CONTENT, error="lost")],
    ],
)
async def test_engines_that_cannot_go_back_together_stay_paused(restored: list[EngineStatus]) -> None:
    engine = Engine(installed=[EngineStatus(0, PLAN, "", error="no memory")] * 2, restored=restored)
    with pytest.raises(SyncFailed):
        await _sync(engine).sync(7)
    assert engine.calls[-1] == "rollback"


@pytest.mark.parametrize("logprob", [-1.001, float("nan")])
async def test_other_log_probabilities_on_the_fixed_prompts_end_the_run(logprob: float) -> None:
    with pytest.raises(SyncFailed, match="fixed prompts"):
        await _sync(Engine(logprob=logprob)).sync(7)


async def test_weights_that_did_not_change_are_an_error_only_when_they_should_have() -> None:
    engine = Engine()
    sync = _sync(engine)
    await sync.sync(7, expect_change=True)  # there is nothing to compare the first version with
    await sync.sync(8)
    with pytest.raises(SyncFailed, match="version 9 has exactly the weights of the version before"):
        await sync.sync(9, expect_change=True)
    assert engine.calls[-1] == "receive"
    lenient = _sync(engine, require_change=False)
    await lenient.sync(9)
    await lenient.sync(10, expect_change=True)


async def test_ranks_of_replicas_that_share_memory_are_held_to_the_same_digests() -> None:
    engine = Engine(staged=[EngineStatus(7, PLAN, CONTENT)] * 3 + [EngineStatus(7, PLAN, "other")])
    with pytest.raises(SyncFailed, match="engine rank 3"):
        await _sync(engine).sync(7)


async def test_the_probe_runs_as_often_as_the_config_says() -> None:
    sync = _sync(Engine(), probe_every=2)
    assert [(await sync.sync(version)).probe_max_diff for version in range(4)] == [0.0, None, 0.0, None]
    assert (await _sync(Engine(), probe_every=0).sync(0)).probe_max_diff is None


def test_one_unlikely_token_decides_in_fp32_and_does_not_in_bf16() -> None:
    differences = np.array([0.0] * 99 + [0.5])
    assert ProbeRule("largest", 1e-4).value(differences) == 0.5
    assert ProbeRule("mean", 0.1).value(differences) == pytest.approx(0.005)
