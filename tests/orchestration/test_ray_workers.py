"""Process groups on Ray: order, threads, failures, deadlines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megarl.orchestration.ray_workers import RayCluster, RayWorkers
from megarl.recovery.failure import WorkerFailed

pytestmark = pytest.mark.slow

PROBE = "tests.orchestration.targets:Probe"


@pytest.fixture(scope="module")
def cluster():
    with RayCluster(object_store_bytes=100 * 2**20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


def start(cluster: RayCluster, folder: Path, name: str, *, size: int = 2, target: str = PROBE, **options) -> RayWorkers:
    args = [(100 * rank,) for rank in range(size)] if target == PROBE else [()] * size
    env = [{"OMP_NUM_THREADS": str(rank + 1)} for rank in range(size)]
    return asyncio.run(cluster.workers(name, target, args, env=env, log_folder=folder, **options))


@pytest.fixture(scope="module")
def healthy(cluster, log_folder) -> RayWorkers:
    return start(cluster, log_folder, "healthy", side_methods=("pid",))


def call(group: RayWorkers, method: str, *args, timeout_s: float = 20.0) -> list:
    return asyncio.run(group.call(method, *args, timeout_s=timeout_s))


def test_results_come_in_rank_order(healthy):
    assert call(healthy, "rank") == [0, 1]
    assert call(healthy, "add", 5) == [5, 105]


def test_each_rank_gets_its_own_arguments(healthy):
    arrays = [(np.arange(3),), (np.arange(100_000),)]
    answers = asyncio.run(healthy.call_each("double", arrays, timeout_s=20.0))
    assert [len(answer) for answer in answers] == [3, 100_000]
    assert answers[1][-1] == 199_998


def test_calls_run_in_one_thread_and_in_the_order_they_were_made(healthy):
    async def burst() -> list:
        return await asyncio.gather(*(healthy.call("remember", i, timeout_s=20.0) for i in range(8)))

    assert asyncio.run(burst())[-1] == [list(range(8))] * 2
    assert len({tuple(call(healthy, "thread")) for _ in range(5)}) == 1


def test_calls_run_in_the_main_thread_where_there_are_no_side_methods(cluster, log_folder):
    group = start(cluster, log_folder, "plain", size=1)
    assert call(group, "in_main_thread") == [True]


def test_a_side_method_answers_while_another_method_runs(healthy):
    async def overtake() -> float:
        slow = asyncio.create_task(healthy.call("sleep", 2.0, timeout_s=20.0))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await healthy.call("pid", timeout_s=20.0)
        waited = time.monotonic() - started
        assert not slow.done()
        await slow
        return waited

    assert asyncio.run(overtake()) < 1.0


def test_environment_and_rendezvous_are_there_when_the_class_is_imported(healthy):
    first, second = call(healthy, "seen_at_import")
    assert (first["OMP_NUM_THREADS"], second["OMP_NUM_THREADS"]) == ("1", "2")
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


def test_output_of_a_rank_and_of_its_children_goes_to_its_log(healthy, log_folder):
    call(healthy, "say", "hello")
    assert (log_folder / "healthy-1.log").read_text().splitlines()[-2:] == ["hello", "hello of a child"]


def test_a_rank_that_raises_fails_the_call_at_once_and_ends_the_group(cluster, log_folder):
    group = start(cluster, log_folder, "raiser")
    started = time.monotonic()
    with pytest.raises(WorkerFailed) as raised:
        call(group, "fail_if_rank", 1)
    assert time.monotonic() - started < 5
    error = raised.value
    assert (error.name, error.rank, error.method, error.died) == ("raiser", 1, "fail_if_rank", False)
    assert error.cause == "ArithmeticError: loss is not finite"
    assert "about to fail" in error.log_lines
    assert any("raise ArithmeticError" in line for line in error.log_lines)
    with pytest.raises(WorkerFailed) as again:
        call(group, "rank")
    assert "unusable" in again.value.__notes__[0]


def test_a_side_call_that_succeeds_after_a_failure_does_not_revive_the_group(cluster, log_folder):
    group = start(cluster, log_folder, "halved", size=1, side_methods=("sleep",))

    async def fail_while_sleeping() -> None:
        sleeping = asyncio.create_task(group.call("sleep", 1.0, timeout_s=20.0))
        with pytest.raises(WorkerFailed):
            await group.call("fail_if_rank", 0, timeout_s=20.0)
        assert await sleeping == ["slept"]

    asyncio.run(fail_while_sleeping())
    with pytest.raises(WorkerFailed):
        call(group, "rank")


def test_a_killed_rank_is_named_even_when_its_peers_complain_first(cluster, log_folder):
    group = start(cluster, log_folder, "dying")
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match="dying rank 1 died in die_if_rank") as raised:
        call(group, "die_if_rank", 1)
    assert raised.value.died
    assert time.monotonic() - started < 10


def test_a_call_to_a_rank_that_was_killed_earlier_fails(cluster, log_folder):
    group = start(cluster, log_folder, "killed", size=1)
    os.kill(call(group, "pid")[0], signal.SIGKILL)
    with pytest.raises(WorkerFailed, match="killed rank 0 died in rank"):
        call(group, "rank")


def test_a_deadline_names_group_method_seconds_and_who_answered(cluster, log_folder):
    group = start(cluster, log_folder, "slow")
    with pytest.raises(TimeoutError, match=r"slow\.sleep_if_rank took longer than 0\.5 s; ranks 0 of 2 have answered"):
        call(group, "sleep_if_rank", 1, 5.0, timeout_s=0.5)
    with pytest.raises(TimeoutError) as again:
        call(group, "rank")
    assert "unusable" in again.value.__notes__[0]


def test_a_result_that_cannot_be_sent_is_the_ranks_failure(cluster, log_folder):
    group = start(cluster, log_folder, "unsendable", size=1)
    with pytest.raises(WorkerFailed, match="cannot pickle"):
        call(group, "unsendable")


def test_a_constructor_that_raises_is_the_ranks_failure(cluster, log_folder):
    with pytest.raises(WorkerFailed, match="broken rank 0 failed in __init__: ValueError: no such model"):
        start(cluster, log_folder, "broken", size=1, target="tests.orchestration.targets:BrokenConstructor")


def test_resources_that_do_not_exist_are_refused_instead_of_waited_for(cluster, log_folder):
    with pytest.raises(ValueError, match=r"huge needs 2000 GPU \(2 ranks x 1000\)"):
        start(cluster, log_folder, "huge", num_gpus=1000)
