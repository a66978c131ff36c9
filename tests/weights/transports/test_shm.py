"""Shared memory holds exactly what was written, says so, and refuses what is not whole."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.weights.engine_layout import EngineLayout
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
from megarl.weights.transports import shm
from megarl.weights.transports.shm import (
    OwnedSegments,
    ShmReader,
    ShmWriter,
    StagingArea,
    StagingError,
    content_digest,
    layout_of,
    remove_abandoned,
)
from tests.weights.models import CONFIGS, numbered_weights
from tests.weights.sharders import engine_shards, megatron_shards

CONFIG = CONFIGS["qwen3_moe"]
SPEC = ModelSpec.from_hf(CONFIG)
TRAINER, ENGINE = MegatronLayout(tp=2, ep=2, world_size=2), EngineLayout(2)
NUM_OPS = len(make_plan(SPEC, TRAINER, ENGINE).ops)


@pytest.fixture
def area() -> Iterator[StagingArea]:
    area = StagingArea(f"test-shm-{os.getpid()}", make_plan(SPEC, TRAINER, ENGINE), "fp32")
    with OwnedSegments.create(area):
        yield area


def _shards(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """The live shards of both trainer ranks; ``seed`` makes another version of them."""
    weights = {name: value + seed for name, value in numbered_weights(SPEC).items()}
    return [
        {name: torch.from_numpy(np.ascontiguousarray(value)).float() for name, value in rank.items()}
        for rank in megatron_shards(CONFIG, weights, TRAINER, "local")
    ]


def _write(area: StagingArea, version: int, seed: int = 0) -> str:
    digests: dict[int, bytes] = {}
    for rank, shards in enumerate(_shards(seed)):
        digests |= ShmWriter(area, rank).write(version, shards)
    return content_digest(digests, NUM_OPS)


def test_every_rank_finds_its_own_shard(area: StagingArea) -> None:
    _write(area, 3)
    expected = engine_shards(CONFIG, numbered_weights(SPEC), 2, expert_parallel=False)
    for rank in range(2):
        found = ShmReader(area, rank).parameters()
        assert found.keys() == expected[rank].keys()
        for name, value in expected[rank].items():
            assert torch.equal(found[name], torch.from_numpy(value).float()), name


def test_both_sides_come_to_the_same_digest(area: StagingArea) -> None:
    written = _write(area, 3)
    assert {ShmReader(area, rank).verify(3) for rank in range(2)} == {written}
    assert _write(area, 4, seed=1) != written


def test_no_two_slots_touch_and_all_are_aligned(area: StagingArea) -> None:
    for rank in range(2):
        layout = layout_of(area, rank)
        end = layout.digests_offset + 16 * len(layout.op_numbers)
        for slot in layout.slots.values():
            assert slot.offset % 64 == 0
            assert slot.offset >= end
            end = slot.offset + 4 * int(np.prod(slot.shape))
        assert end <= layout.size


@pytest.mark.parametrize("which", ["first", "last"])
def test_one_flipped_byte_is_found_and_named(area: StagingArea, which: str) -> None:
    _write(area, 3)
    layout = layout_of(area, 1)
    name = list(layout.slots)[0 if which == "first" else -1]
    with area.path(1).open("r+b") as file:
        file.seek(layout.slots[name].offset + 1)
        byte = file.read(1)[0]
        file.seek(layout.slots[name].offset + 1)
        file.write(bytes([byte ^ 1]))
    ShmReader(area, 0).verify(3)
    with pytest.raises(StagingError, match=rf"checksum of {name} "):
        ShmReader(area, 1).verify(3)


def test_a_version_that_not_all_ranks_have_written_is_refused(area: StagingArea) -> None:
    _write(area, 3)
    ShmWriter(area, 0).write(4, _shards()[0])
    for version, state in ((3, "last wrote version 4"), (4, "last wrote version 3")):
        with pytest.raises(StagingError, match=state):
            ShmReader(area, 0).verify(version)


def test_a_writer_that_fails_half_way_leaves_no_version(area: StagingArea) -> None:
    _write(area, 3)
    shards = _shards()[0]
    del shards[sorted(shards)[-1]]
    with pytest.raises(StagingError, match="trainer rank 0 cannot send"):
        ShmWriter(area, 0).write(4, shards)
    with pytest.raises(StagingError, match="trainer rank 0 is still writing"):
        ShmReader(area, 0).require_version(4)


def test_an_op_without_a_digest_is_missed() -> None:
    with pytest.raises(StagingError, match="1 of 3 ops were not written, the first is op 1"):
        content_digest({0: b"a", 2: b"b"}, 3)


def test_a_segment_of_another_plan_is_refused(area: StagingArea) -> None:
    other = dataclasses.replace(area, plan=dataclasses.replace(area.plan, digest="other"))
    with pytest.raises(StagingError, match="made for another weight plan"):
        ShmReader(other, 0)


def test_a_segment_that_is_missing_or_short_is_refused(area: StagingArea) -> None:
    os.truncate(area.path(0), layout_of(area, 0).size - 1)
    with pytest.raises(StagingError, match="should have"):
        ShmReader(area, 0)
    with pytest.raises(StagingError, match="has None"):
        ShmReader(dataclasses.replace(area, run="no-such-run"), 0)


def test_too_little_shared_memory_is_said_before_anything_is_made(area: StagingArea, monkeypatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(shm.os, "statvfs", lambda _: Full)
    other = dataclasses.replace(area, run=f"test-full-{os.getpid()}")
    with pytest.raises(StagingError, match=r"bytes of shared memory and /dev/shm has 4,096 free; enlarge it"):
        OwnedSegments.create(other)
    assert not list(Path("/dev/shm").glob(f"megarl-{other.run}-*"))


def test_a_name_in_use_is_refused_and_its_segments_stay(area: StagingArea) -> None:
    with pytest.raises(StagingError, match="belongs to a run that is alive"):
        OwnedSegments.create(area)
    assert area.path(0).exists()
    assert area.path(1).exists()


def test_segments_of_a_killed_run_are_removed_and_those_of_living_ones_stay(area: StagingArea) -> None:
    abandoned = Path(f"/dev/shm/megarl-test-dead-{os.getpid()}-d0")
    script = f"import fcntl, os, signal; f = open({str(abandoned)!r}, 'wb'); f.write(b'x'); f.flush()\n"
    script += "fcntl.flock(f, fcntl.LOCK_EX); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script], check=False, timeout=30)
    assert abandoned.exists()
    assert abandoned in remove_abandoned()
    assert not abandoned.exists()
    assert area.path(0).exists()


def test_segments_are_gone_after_their_owner(area: StagingArea) -> None:
    other = dataclasses.replace(area, run=f"test-gone-{os.getpid()}")
    with OwnedSegments.create(other):
        assert other.path(0).exists()
    assert not other.path(0).exists()
    assert not other.path(1).exists()
