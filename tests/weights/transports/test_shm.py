"""Shared memory is reserved, locked and removed, and refuses what is not whole."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.weights.transports import shm
from megarl.weights.transports.segment import layout_of
from megarl.weights.transports.shm import SharedMemory, remove_abandoned
from megarl.weights.transports.transport import StagingError
from tests.weights.transports.staging import RANKS, cargo, live_shards


@pytest.fixture
def transport() -> Iterator[SharedMemory]:
    transport = SharedMemory(f"test-shm-{os.getpid()}", cargo())
    with transport.opened():
        yield transport


def _write(transport: SharedMemory, version: int) -> None:
    for rank in range(RANKS):
        transport.writer(rank).write(version, live_shards()[rank])


def test_no_two_slots_touch_and_all_are_aligned(transport: SharedMemory) -> None:
    for rank in range(2):
        layout = layout_of(transport.cargo, rank)
        end = layout.checksums_offset + 16 * len(layout.op_numbers)
        for slot in layout.slots.values():
            assert slot.offset % 64 == 0
            assert slot.offset >= end
            end = slot.end
        assert end <= layout.size


@pytest.mark.parametrize("place", [0, -1])
def test_one_flipped_byte_is_found_and_named(transport: SharedMemory, place: int) -> None:
    _write(transport, 3)
    slots = layout_of(transport.cargo, 1).slots
    name = list(slots)[place]
    with transport.path(1).open("r+b") as file:
        file.seek(slots[name].offset + 1)
        byte = file.read(1)[0]
        file.seek(slots[name].offset + 1)
        file.write(bytes([byte ^ 1]))
    transport.reader(0, 0).receive(3, 0.0)
    with pytest.raises(StagingError, match=rf"checksum of {name} "):
        transport.reader(0, 1).receive(3, 0.0)


def test_a_version_that_not_all_ranks_have_written_is_refused(transport: SharedMemory) -> None:
    _write(transport, 3)
    transport.writer(0).write(4, live_shards()[0])
    for version, state in ((3, "last wrote version 4"), (4, "last wrote version 3")):
        with pytest.raises(StagingError, match=state):
            transport.reader(0, 0).receive(version, 0.0)


def test_a_writer_that_fails_half_way_leaves_no_version(transport: SharedMemory) -> None:
    _write(transport, 3)
    shards = live_shards()[0]
    del shards[sorted(shards)[-1]]
    with pytest.raises(StagingError, match="trainer rank 0 cannot send"):
        transport.writer(0).write(4, shards)
    with pytest.raises(StagingError, match="trainer rank 0 is still writing"):
        transport.reader(0, 0).receive(4, 0.0)


def test_a_segment_of_another_plan_is_refused(transport: SharedMemory) -> None:
    other = dataclasses.replace(transport.cargo, plan=dataclasses.replace(transport.cargo.plan, digest="other"))
    with pytest.raises(StagingError, match="made for another weight plan"):
        dataclasses.replace(transport, cargo=other).reader(0, 0)


def test_a_segment_that_is_missing_or_short_is_refused(transport: SharedMemory) -> None:
    os.truncate(transport.path(0), layout_of(transport.cargo, 0).size - 1)
    with pytest.raises(StagingError, match="should have"):
        transport.reader(0, 0)
    with pytest.raises(StagingError, match="has None"):
        dataclasses.replace(transport, run="no-such-run").reader(0, 0)


def test_too_little_shared_memory_is_said_before_anything_is_made(transport: SharedMemory, monkeypatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(shm.os, "statvfs", lambda _: Full)
    other = dataclasses.replace(transport, run=f"test-full-{os.getpid()}")
    with (
        pytest.raises(StagingError, match=r"bytes of shared memory and /dev/shm has 4,096 free; enlarge it"),
        other.opened(),
    ):
        pass
    assert not list(Path("/dev/shm").glob(f"megarl-{other.run}-*"))


def test_a_name_in_use_is_refused_and_its_segments_stay(transport: SharedMemory) -> None:
    with pytest.raises(StagingError, match="belongs to a run that is alive"), transport.opened():
        pass
    assert transport.path(0).exists()
    assert transport.path(1).exists()


def test_segments_of_a_killed_run_are_removed_and_those_of_living_ones_stay(transport: SharedMemory) -> None:
    abandoned = Path(f"/dev/shm/megarl-test-dead-{os.getpid()}-d0")
    script = f"import fcntl, os, signal; f = open({str(abandoned)!r}, 'wb'); f.write(b'x'); f.flush()\n"
    script += "fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script], check=False, timeout=30)
    assert abandoned.exists()
    assert abandoned in remove_abandoned()
    assert not abandoned.exists()
    assert transport.path(0).exists()


def test_segments_are_gone_after_their_owner(transport: SharedMemory) -> None:
    other = dataclasses.replace(transport, run=f"test-gone-{os.getpid()}")
    with other.opened():
        assert other.path(0).exists()
    assert not other.path(0).exists()
    assert not other.path(1).exists()
