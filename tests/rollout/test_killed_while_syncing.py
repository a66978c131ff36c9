"""An engine rank that dies during a sync is named at once, whatever it was doing."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from megarl.orchestration.ray_workers import RayCluster
from megarl.recovery.failure import WorkerFailed
from megarl.weights.engine_layout import engine_layout_of
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
from megarl.weights.transports.shm import SharedMemory
from megarl.weights.transports.transport import Cargo
from tests.rollout.live_engines import Files, rollout, start
from tests.trainer.families import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("moment", ["receive", "install"])
def test_a_rank_that_is_killed_is_named_and_soon(moment: str, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "model")
    plan = make_plan(ModelSpec.from_folder(tmp_path / "model"), MegatronLayout(), engine_layout_of(rollout()))
    transport = SharedMemory(f"test-killed-{os.getpid()}", Cargo(plan, "fp32"))
    target = "tests.rollout.weak_workers:SlowWorker"

    async def kill_meanwhile(cluster: RayCluster) -> None:
        engine, workers = await start(cluster, rollout(), tmp_path / "model", tmp_path / "logs", target, "killed")
        await engine.attach(transport)
        trainer = Files(ModelSpec.from_folder(tmp_path / "model"), transport, engine, {"new": tmp_path / "model"})
        pid = (await workers.call("pid", timeout_s=30))[0]
        if moment == "install":
            await asyncio.gather(trainer.stage_weights(1), engine.receive(1))
            await engine.pause()
        waiting = asyncio.create_task(engine.receive(1) if moment == "receive" else engine.install(1))
        await asyncio.sleep(1)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await waiting

    with (
        asyncio.Runner() as runner,
        transport.opened(),
        RayCluster() as cluster,
        pytest.raises(WorkerFailed, match=f"killed rank 0 died in {moment}"),
    ):
        runner.run(kill_meanwhile(cluster))
