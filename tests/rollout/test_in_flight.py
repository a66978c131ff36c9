"""Requests that run while weights change: they end as aborted, or go on under the new version, token for token."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from megarl.orchestration.ray_workers import RayCluster
from megarl.rollout.engine import InFlight, VllmEngines
from megarl.types import GenerateRequest, Turn
from megarl.weights.engine_layout import engine_layout_of
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
from megarl.weights.transports.shm import SharedMemory
from megarl.weights.transports.transport import Cargo
from tests.rollout.live_engines import SEQUENCES, Files, rollout, start
from tests.trainer.families import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CONFIG = rollout(tensor_parallel=2, max_tokens=90, max_model_len=128)
REQUESTS = [GenerateRequest(SEQUENCES[2], seed=number, max_tokens=90, temperature=1.0) for number in range(8)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("in-flight")
    for seed, name in enumerate(("old", "new")):
        write_model("qwen3", root / name, seed=seed)
    return {name: root / name for name in ("old", "new")}


async def _sync_meanwhile(engine: VllmEngines, trainer: Files) -> list[Turn]:
    """Generate, and put version 1 in place after the first steps."""
    generating = asyncio.create_task(engine.generate(REQUESTS))
    await asyncio.sleep(0.15)
    assert not generating.done(), "too fast for this test: ask for more tokens"
    _, received = await asyncio.gather(trainer.stage_weights(1), engine.receive(1))
    await engine.pause()
    installed = await engine.install(1)
    assert not any(status.error for status in (*received, *installed))
    await engine.resume(1)
    return await generating


def _turns(in_flight: InFlight, folders: dict[str, Path], logs: Path) -> tuple[list[Turn], list[Turn]]:
    """(turns that ran during the sync, the same requests afterwards)"""
    spec = ModelSpec.from_folder(folders["old"])
    cargo = Cargo(make_plan(spec, MegatronLayout(), engine_layout_of(CONFIG)), "fp32")
    transport = SharedMemory(f"test-in-flight-{os.getpid()}", cargo)
    target = "megarl.rollout.vllm_engine:VllmWorker"
    with asyncio.Runner() as runner, transport.opened(), RayCluster() as cluster:
        engine, _ = runner.run(start(cluster, CONFIG, folders["old"], logs, target, "engine", in_flight))
        runner.run(engine.attach(transport))
        runner.run(engine.generate(REQUESTS[:1]))  # the first call is slow
        trainer = Files(spec, transport, engine, folders)
        during = runner.run(_sync_meanwhile(engine, trainer))
        return during, runner.run(engine.generate(REQUESTS))


def test_kept_requests_go_on_under_the_new_version_and_say_which_token_is_whose(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    during, after = _turns("keep", folders, tmp_path)
    assert {turn.version for turn in after} == {1}
    spanning = [turn for turn in during if turn.version_spans]
    assert len(spanning) > len(during) / 2
    for turn in spanning:
        assert turn.version == 0
        assert [version for version, _ in turn.version_spans] == [0, 1]
        assert sum(tokens for _, tokens in turn.version_spans) == len(turn.completion_ids)
        assert all(tokens > 0 for _, tokens in turn.version_spans)
    for turn in during:
        assert turn.finish_reason in ("stop", "length")


def test_aborted_requests_are_empty_and_later_ones_are_not(folders: dict[str, Path], tmp_path: Path) -> None:
    during, after = _turns("abort", folders, tmp_path)
    aborted = [turn for turn in during if turn.finish_reason == "abort"]
    assert len(aborted) > len(during) / 2
    assert not any(turn.completion_ids or turn.rollout_logprobs for turn in aborted)
    assert all(turn.completion_ids and turn.version == 1 for turn in after)
