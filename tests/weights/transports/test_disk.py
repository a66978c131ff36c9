"""Versions on disk appear whole, a few of them stay, and who comes late catches up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.weights.transports.disk import Disk
from megarl.weights.transports.transport import StagingError
from tests.weights.transports.staging import RANKS, cargo, expected_shards, live_shards


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "weights", cargo())
    with disk.opened():
        yield disk


def _publish(disk: Disk, version: int, seed: int = 0) -> None:
    disk.begin(version)
    for rank in range(RANKS):
        disk.writer(rank).write(version, live_shards(seed)[rank])
    disk.publish(version)


def test_an_engine_that_starts_later_catches_up(disk: Disk) -> None:
    _publish(disk, 3)
    _publish(disk, 4, seed=2)
    late = Disk(disk.folder, cargo())
    assert late.versions() == [3, 4]
    reader = late.reader(0, 1)
    reader.receive(late.versions()[-1], 0.0)
    for name, value in expected_shards(seed=2)[1].items():
        assert torch.equal(reader.parameters()[name], value)


def test_only_the_newest_versions_stay(disk: Disk) -> None:
    for version in range(5):
        _publish(disk, version)
    assert disk.versions() == [3, 4]


def test_a_half_written_version_is_not_there_and_is_swept_up(disk: Disk) -> None:
    _publish(disk, 3)
    disk.begin(4)
    disk.writer(0).write(4, live_shards()[0])
    assert disk.versions() == [3]
    with pytest.raises(StagingError, match="did not appear within 0 s"):
        disk.reader(0, 0).receive(4, 0.0)
    with Disk(disk.folder, cargo()).opened():
        assert not list(disk.folder.glob("*.tmp"))


def test_publishing_a_version_again_replaces_it(disk: Disk) -> None:
    _publish(disk, 3)
    _publish(disk, 3, seed=4)
    reader = disk.reader(0, 0)
    reader.receive(3, 0.0)
    assert torch.equal(reader.parameters()["lm_head.weight"], expected_shards(seed=4)[0]["lm_head.weight"])


def test_nothing_can_be_read_before_a_version_came(disk: Disk) -> None:
    with pytest.raises(StagingError, match="no version was received yet"):
        disk.reader(0, 0).parameters()
