"""New weights in live vLLM engines: as good as a fresh engine, undone bit for bit, refused when they are not right."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.config import WeightsConfig
from megarl.orchestration.ray_workers import RayCluster, RayWorkers
from megarl.recovery.failure import WorkerFailed
from megarl.rollout.engine import VllmEngines
from megarl.types import GenerateRequest, SyncReport, Turn
from megarl.weights.engine_layout import engine_layout_of
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
from megarl.weights.sync import BridgeSync, ProbeRule, SyncFailed
from megarl.weights.transports.shm import SharedMemory
from megarl.weights.transports.transport import Cargo
from tests.rollout.live_engines import SEQUENCES, Change, Files, Shards, rollout, start
from tests.trainer.families import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

REQUESTS = tuple(GenerateRequest(SEQUENCES[n % 3], seed=n, max_tokens=12, temperature=1.0) for n in range(12))

SETUPS = {
    "experts, an own head": ("qwen3_moe", rollout()),
    "dense, biases, a tied head": ("qwen2", rollout()),
    "whole experts on two ranks": ("glm4_moe", rollout(tensor_parallel=2, expert_parallel=True)),
    "latent attention, experts dealt out": (
        "deepseek_v3",
        rollout(tensor_parallel=2, expert_parallel=True, expert_placement="round_robin"),
    ),
}


@dataclass
class Bench:
    """A live engine, an engine loaded with the new weights, and a trainer between them."""

    run: Callable[[Any], Any]
    engine: VllmEngines
    trainer: Files
    workers: RayWorkers
    versions: Iterator[int] = field(default_factory=lambda: iter(range(1, 1000)))
    syncer: BridgeSync | None = None

    def sync(self, which: str, change: Change | None = None, *, probe: bool = True, **expect: bool) -> SyncReport:
        """The whole sync of the weights of a folder; the probe only knows the new ones."""
        self.trainer.which, self.trainer.change = which, change
        plan = self.trainer.transport.cargo.plan
        if self.syncer is None or not expect:
            self.syncer = BridgeSync(
                self.trainer,
                self.engine,
                WeightsConfig(probe_every=int(probe and which == "new")),
                plan_digest=plan.digest,
                lower_bound_bytes=sum(plan.num_bytes(rank, 4) for rank in range(len(plan.shapes))),
                probe_sequences=SEQUENCES,
                probe_rule=ProbeRule("largest", 1e-4),
            )
        return self.run(self.syncer.sync(next(self.versions), **expect))

    def score(self) -> list[list[float]]:
        return self.run(self.engine.score(SEQUENCES))

    def generate(self, requests: Sequence[GenerateRequest] = REQUESTS) -> list[Turn]:
        return self.run(self.engine.generate(requests))

    def call(self, method: str, *args: Any) -> list[Any]:
        """One method of every engine rank."""
        return self.run(self.workers.call(method, *args, timeout_s=90))


@pytest.fixture(scope="module", params=SETUPS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    family, config = SETUPS[request.param]
    root = tmp_path_factory.mktemp(family)
    folders = {name: root / name for name in ("old", "new")}
    for seed, folder in enumerate(folders.values()):
        write_model(family, folder, seed=seed)
    spec = ModelSpec.from_folder(folders["old"])
    plan = make_plan(spec, MegatronLayout(), engine_layout_of(config))
    transport = SharedMemory(f"test-{family}-{os.getpid()}", Cargo(plan, "fp32"))
    target = "tests.rollout.weak_workers:ForgetfulWorker"
    with asyncio.Runner() as runner, transport.opened(), RayCluster() as cluster:
        engine, workers = runner.run(start(cluster, config, folders["old"], root / "logs", target, "old"))
        oracle, _ = runner.run(start(cluster, config, folders["new"], root / "logs", target, "new"))
        runner.run(engine.attach(transport))
        yield Bench(runner.run, engine, Files(spec, transport, oracle, folders), workers)


def test_installed_weights_score_bit_for_bit_like_a_fresh_engine(bench: Bench) -> None:
    before = bench.score()
    report = bench.sync("new")
    installed = bench.score()
    assert installed != before
    assert bench.run(bench.trainer.oracle.score(SEQUENCES)) == installed
    assert report.probe_max_diff == 0.0
    assert report.lower_bound_bytes == report.bytes_moved > 0
    bench.sync("old")
    assert bench.score() == before


def test_a_sync_of_unchanged_weights_changes_nothing(bench: Bench) -> None:
    bench.sync("new")
    scores, turns = bench.score(), bench.generate()
    bench.sync("new", expect_change=False)
    assert bench.score() == scores
    assert [turn.completion_ids for turn in bench.generate()] == [turn.completion_ids for turn in turns]


def test_unchanged_weights_after_a_step_that_must_have_changed_them_are_an_error(bench: Bench) -> None:
    bench.sync("new")
    scores = bench.score()
    with pytest.raises(SyncFailed, match="exactly the weights of the version before"):
        bench.sync("new", expect_change=True)
    assert bench.score() == scores


def test_the_same_requests_give_the_same_turns_under_the_version_in_place(bench: Bench) -> None:
    version = bench.sync("new").version
    first, second = bench.generate(), bench.generate()
    assert first == second
    assert {turn.version for turn in first} == {version}
    assert all(len(turn.rollout_logprobs) == len(turn.completion_ids) > 0 for turn in first)
    assert all(0 <= token < VOCAB for turn in first for token in turn.completion_ids)
    assert len({turn.completion_ids for turn in first}) > 3


def test_sampled_logprobs_are_those_of_scoring(bench: Bench) -> None:
    for turn in bench.generate(REQUESTS[:3]):
        scored = bench.run(bench.engine.score([(*turn.prompt_ids, *turn.completion_ids)]))[0]
        assert turn.rollout_logprobs == pytest.approx(scored[len(turn.prompt_ids) - 1 :], abs=1e-5)


def test_a_rollback_gives_the_old_numbers_bit_for_bit(bench: Bench) -> None:
    old = bench.sync("old").version
    before = bench.score()
    version = next(bench.versions)
    bench.trainer.which, bench.trainer.change = "new", None
    bench.run(bench.trainer.stage_weights(version))
    assert not any(status.error for status in bench.call("receive", version))
    bench.call("pause")
    assert {status.version for status in bench.call("install", version)} == {version}
    assert {(status.error, status.version) for status in bench.call("rollback")} == {("", old)}
    bench.call("resume", old)
    assert bench.score() == before


def test_a_flipped_byte_is_found_and_nothing_can_be_installed(bench: Bench) -> None:
    old = bench.sync("old").version
    before = bench.score()
    version = next(bench.versions)
    bench.run(bench.trainer.stage_weights(version))
    with bench.trainer.transport.path(0).open("r+b") as segment:
        segment.seek(-64, 2)
        byte = segment.read(1)
        segment.seek(-64, 2)
        segment.write(bytes([byte[0] ^ 1]))
    assert "checksum" in bench.call("receive", version)[0].error
    bench.call("pause")
    assert "not received" in bench.call("install", version)[0].error
    bench.call("rollback")
    bench.call("resume", old)
    assert bench.score() == before


def test_weights_that_were_never_staged_are_refused(bench: Bench) -> None:
    assert "is not staged" in bench.call("receive", 9999, 0.1)[0].error


# --- wrong mappings: every byte arrives as it was sent, and only behaviour tells -------------------------------------


def _swap_gate_and_up(shards: Shards) -> None:
    for name, shard in shards.items():
        if ".linear_fc1.weight" in name and "layers.2." in name:
            shard.copy_(shard.roll(len(shard) // 2, 0))


def _permute_two_experts(shards: Shards) -> None:
    experts = "decoder.layers.1.mlp.experts.local_experts."
    for name in [name for name in shards if name.startswith(experts + "0.")]:
        other = name.replace(experts + "0.", experts + "1.")
        shards[name], shards[other] = shards[other], shards[name]


def _shift_query_groups(shards: Shards) -> None:
    for name in ("self_attention.linear_qkv.weight", "self_attention.linear_kv_up_proj.weight"):
        if f"decoder.layers.0.{name}" in shards:
            shard = shards[f"decoder.layers.0.{name}"]
            shard.copy_(shard.roll(len(shard) // 2, 0))


def _shift_vocabulary(shards: Shards) -> None:
    """As if padding stood before the words."""
    table = shards["embedding.word_embeddings.weight"]
    table.copy_(table.roll(1, 0))


def test_a_wrong_mapping_does_not_survive_the_fixed_prompts(bench: Bench) -> None:
    changes = [_swap_gate_and_up, _shift_query_groups, _shift_vocabulary]
    for change in [*changes, *([_permute_two_experts] if bench.trainer.spec.experts else [])]:
        with pytest.raises(SyncFailed, match="on fixed prompts the largest difference"):
            bench.sync("new", change)
    bench.sync("new")


def test_handlers_that_still_hold_old_weights_do_not_survive_the_module_probe(bench: Bench, tmp_path: Path) -> None:
    """With the packing left out, as vLLM's own reloading does for tied heads, the old product is computed."""
    bench.sync("old")
    before = bench.score()
    bench.call("forget_to_pack", True)
    try:
        with pytest.raises(SyncFailed, match="does not compute with the installed weights"):
            bench.sync("new")
    finally:
        bench.call("forget_to_pack", False)
    assert bench.score() == before


def test_a_plan_of_another_model_is_refused(bench: Bench, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "other")
    plan = make_plan(ModelSpec.from_folder(tmp_path / "other"), MegatronLayout(), engine_layout_of(rollout()))
    with pytest.raises(WorkerFailed, match=r"WeightMismatch: .*plan"):
        bench.run(bench.trainer.oracle.attach(SharedMemory("test-other", Cargo(plan, "fp32"))))
