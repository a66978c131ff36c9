"""What holds for every transport: engine ranks get exactly what the trainer ranks had, or an error that says why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megarl.ports import free_port
from megarl.weights.transports.disk import Disk
from megarl.weights.transports.p2p import PointToPoint
from megarl.weights.transports.shm import SharedMemory
from megarl.weights.transports.transport import Reader, StagingError, Transport, Writer, Written
from tests.weights.transports.staging import RANKS, cargo, expected_shards, live_shards


@dataclass
class Bench:
    """Both sides of an open transport, in one process: a thread for every rank."""

    transport: Transport
    writers: list[Writer]
    readers: list[Reader]
    pool: ThreadPoolExecutor

    def sync(self, version: int, seed: int = 0) -> tuple[Written, list[str]]:
        """Write and receive at the same time."""
        self.transport.begin(version)
        received = [self.pool.submit(reader.receive, version, 10.0) for reader in self.readers]
        written = Written()
        shards = live_shards(seed)
        for of_rank in self.pool.map(lambda rank: self.writers[rank].write(version, shards[rank]), range(RANKS)):
            written |= of_rank
        self.transport.publish(version)
        return written, [one.result() for one in received]


@pytest.fixture(params=["shm", "disk", "p2p", "p2p with two replicas"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    replicas = 2 if "replicas" in request.param else 1
    transport: Transport
    if request.param == "shm":
        transport = SharedMemory(f"test-contract-{os.getpid()}", cargo())
    elif request.param == "disk":
        transport = Disk(tmp_path / "weights", cargo())
    else:
        transport = PointToPoint(f"127.0.0.1:{free_port()}", cargo(replicas), RANKS, 2, 20.0)
    with transport.opened(), ThreadPoolExecutor() as pool:
        writers = [pool.submit(transport.writer, rank) for rank in range(RANKS)]
        readers = [pool.submit(transport.reader, replica, rank) for replica in range(replicas) for rank in range(2)]
        bench = Bench(transport, [one.result() for one in writers], [one.result() for one in readers], pool)
        yield bench
        for side in (*bench.writers, *bench.readers):
            side.close()


def test_every_rank_gets_its_own_shard_of_every_version(bench: Bench) -> None:
    for version, seed in ((0, 0), (1, 5)):  # 0 is a version like any other
        bench.sync(version, seed)
        expected = expected_shards(seed)
        for place, reader in enumerate(bench.readers):
            found = reader.parameters()
            assert found.keys() == expected[place % 2].keys()
            for name, value in expected[place % 2].items():
                assert found[name].dtype == value.dtype, name
                assert torch.equal(found[name], value), name


def test_both_sides_come_to_the_same_digests(bench: Bench) -> None:
    written, received = bench.sync(3)
    assert bench.transport.content_digests(written.checksums) == received
    again, received_again = bench.sync(4)
    assert received_again == received
    assert again.num_bytes == written.num_bytes
    assert bench.sync(5, seed=1)[1] != received


def test_no_byte_is_sent_twice(bench: Bench) -> None:
    written, _ = bench.sync(3)
    plan = bench.transport.cargo.plan
    needed = sum(plan.num_bytes(rank, 2) for rank in range(len(plan.shapes)))
    assert needed <= written.num_bytes <= 1.05 * needed


def test_a_version_that_never_comes_is_missed(bench: Bench) -> None:
    bench.sync(3)
    with pytest.raises(StagingError, match=r"version 4.* 0\.2 s|version 4.* within 0\.2"):
        bench.readers[0].receive(4, 0.2)


def test_a_shard_that_is_missing_is_named(bench: Bench) -> None:
    bench.sync(3)
    shards = live_shards()[0]
    shards.pop("embedding.word_embeddings.weight")
    bench.transport.begin(4)
    with pytest.raises(StagingError, match=r"trainer rank 0 cannot send .* from embedding.word_embeddings.weight"):
        bench.writers[0].write(4, shards)


def test_a_piece_without_a_checksum_is_missed(bench: Bench) -> None:
    written, _ = bench.sync(3)
    del written.checksums[0]
    with pytest.raises(StagingError, match="were not written, the first is 0"):
        bench.transport.content_digests(written.checksums)
