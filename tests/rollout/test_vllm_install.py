"""New weights in a live vLLM engine: as good as a fresh engine, undone bit for bit, refused when they are not right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import RolloutConfig
from megarl.orchestration.ray_workers import RayCluster
from megarl.recovery.failure import WorkerFailed
from megarl.types import GenerateRequest
from megarl.weights.engine_layout import EngineLayout
from megarl.weights.hf_files import ShardReader
from megarl.weights.megatron_layout import MegatronLayout, megatron_params
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
from megarl.weights.transports.shm import OwnedSegments, ShmWriter, StagingArea, content_digest
from tests.trainer.families import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CONFIG = RolloutConfig(dtype="fp32", max_tokens=16, max_model_len=96, max_num_seqs=16, kv_cache_gib=0.1)
SEQUENCES = (tuple(range(2, 40)), tuple(range(90, 60, -1)), (5, 5, 5, 7))
REQUESTS = tuple(GenerateRequest(SEQUENCES[n % 3], seed=n, max_tokens=12, temperature=1.0) for n in range(12))


class Engine:
    """A ``VllmWorker`` in a process of its own: vLLM keeps global state, so a process can hold one engine."""

    def __init__(self, runner: asyncio.Runner, cluster: RayCluster, folder: Path, logs: Path) -> None:
        self._run = runner.run
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        target = "megarl.rollout.vllm_engine:VllmWorker"
        starting = cluster.workers(folder.name, target, [(CONFIG, folder, 0)], env=[env], log_folder=logs)
        self._workers = self._run(starting)
        self.call("setup", 0, self.call("free_endpoint"))

    def call(self, method: str, *args: Any) -> Any:
        """One method of the engine."""
        return self._run(self._workers.call(method, *args, timeout_s=90))[0]


@dataclass
class Bench:
    """A live engine, an engine loaded with the new weights, a trainer rank, and the segments between them."""

    engine: Engine
    fresh: Engine
    folders: dict[str, Path]
    area: StagingArea

    def stage(self, which: str, version: int) -> str:
        """Write the weights of ``folders[which]`` as the trainer would; the content digest."""
        spec = ModelSpec.from_folder(self.folders[which])
        with ShardReader(self.folders[which]) as reader:
            shards = {n: reader.read(s, torch.float32) for n, s in megatron_params(spec, MegatronLayout(), 0).items()}
        return content_digest(ShmWriter(self.area, 0).write(version, shards), len(self.area.plan.ops))

    def publish(self, which: str, version: int) -> None:
        """The whole sync, which must go well."""
        digest = self.stage(which, version)
        assert self.engine.call("verify_staged", version).content_digest == digest
        self.engine.call("pause")
        status = self.engine.call("install", version)
        assert (status.error, status.version, status.content_digest) == ("", version, digest)
        self.engine.call("resume", version)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2"])  # experts and an own head; dense, biases, a tied head
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp(request.param)
    folders = {name: root / name for name in ("old", "new")}
    for seed, folder in enumerate(folders.values()):
        write_model(request.param, folder, seed=seed)
    spec = ModelSpec.from_folder(folders["old"])
    area = StagingArea(f"test-{request.param}", make_plan(spec, MegatronLayout(), EngineLayout()), "fp32")
    with asyncio.Runner() as runner, OwnedSegments.create(area), RayCluster() as cluster:
        engine, fresh = (Engine(runner, cluster, folder, root / "logs") for folder in folders.values())
        engine.call("attach", area)
        yield Bench(engine, fresh, folders, area)


def test_installed_weights_score_bit_for_bit_like_a_fresh_engine(bench: Bench) -> None:
    before = bench.engine.call("score", SEQUENCES)
    bench.publish("new", 1)
    installed = bench.engine.call("score", SEQUENCES)
    assert installed != before
    assert bench.fresh.call("score", SEQUENCES) == installed
    bench.publish("old", 2)
    assert bench.engine.call("score", SEQUENCES) == before


def test_the_same_requests_give_the_same_turns_under_the_version_in_place(bench: Bench) -> None:
    bench.publish("new", 3)
    first, second = bench.engine.call("generate", REQUESTS), bench.engine.call("generate", REQUESTS)
    assert first == second
    assert {turn.version for turn in first} == {3}
    assert all(len(turn.rollout_logprobs) == len(turn.completion_ids) > 0 for turn in first)
    assert all(0 <= token < VOCAB for turn in first for token in turn.completion_ids)
    assert len({turn.completion_ids for turn in first}) > 3


def test_sampled_logprobs_are_those_of_scoring(bench: Bench) -> None:
    for turn in bench.engine.call("generate", REQUESTS[:3]):
        scored = bench.engine.call("score", [(*turn.prompt_ids, *turn.completion_ids)])[0]
        assert turn.rollout_logprobs == pytest.approx(scored[len(turn.prompt_ids) - 1 :], abs=1e-5)


def test_a_rollback_gives_the_old_numbers_bit_for_bit(bench: Bench) -> None:
    bench.publish("old", 4)
    before = bench.engine.call("score", SEQUENCES)
    bench.stage("new", 5)
    assert bench.engine.call("verify_staged", 5).error == ""
    bench.engine.call("pause")
    assert bench.engine.call("install", 5).version == 5
    status = bench.engine.call("rollback")
    assert (status.error, status.version) == ("", 4)
    bench.engine.call("resume", 4)
    assert bench.engine.call("score", SEQUENCES) == before


def test_a_flipped_byte_is_found_and_nothing_can_be_installed(bench: Bench) -> None:
    bench.publish("old", 6)
    before = bench.engine.call("score", SEQUENCES)
    bench.stage("new", 7)
    with bench.area.path(0).open("r+b") as segment:
        segment.seek(-64, 2)
        byte = segment.read(1)
        segment.seek(-64, 2)
        segment.write(bytes([byte[0] ^ 1]))
    assert "checksum" in bench.engine.call("verify_staged", 7).error
    bench.engine.call("pause")
    assert "not verified" in bench.engine.call("install", 7).error
    bench.engine.call("rollback")
    bench.engine.call("resume", 6)
    assert bench.engine.call("score", SEQUENCES) == before


def test_weights_that_were_never_staged_are_refused(bench: Bench) -> None:
    assert "is not staged" in bench.engine.call("verify_staged", 99).error


def test_a_plan_of_another_model_is_refused(bench: Bench, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "other")
    plan = make_plan(ModelSpec.from_folder(tmp_path / "other"), MegatronLayout(), EngineLayout())
    with pytest.raises(WorkerFailed, match=r"WeightMismatch: .*plan"):
        bench.fresh.call("attach", StagingArea("test-other", plan, "fp32"))
