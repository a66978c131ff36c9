"""Weights through shared memory: one segment per engine rank, ``/dev/shm/megarl-<run>-d<rank>``.

All replicas of an engine read the same segments, and the segments are used again by every sync: fresh pages cost
twice the time of touched ones.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megarl.weights.transports import segment
from megarl.weights.transports.segment import Segment, layout_of
from megarl.weights.transports.transport import Cargo, StagingError, Written

FOLDER = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A ``Transport`` for trainer and engines on one machine.

    While it is open the owner holds a lock on every segment. A lock dies with its process, so segments of a killed run
    are known by being unlocked, and the next ``opened`` removes them.

    Example: ``SharedMemory("moe-grpo-4711", Cargo(plan, "bf16"))``
    """

    run: str
    """Unique among the runs alive on the machine."""
    cargo: Cargo

    def path(self, dst_rank: int) -> Path:
        """The segment of engine rank ``dst_rank``."""
        return FOLDER / f"megarl-{self.run}-d{dst_rank}"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Reserve the memory of all segments; they are removed afterwards.

        Raises:
            StagingError: /dev/shm has too little room.
        """
        remove_abandoned()
        layouts = [layout_of(self.cargo, rank) for rank in range(len(self.cargo.plan.shapes))]
        _require_space(sum(layout.size for layout in layouts))
        owned: list[tuple[Path, int]] = []
        try:
            for rank, layout in enumerate(layouts):
                owned.append((self.path(rank), _own(self.path(rank))))
                segment.create(owned[-1][1], layout, self.cargo.plan)
            yield
        finally:
            for path, descriptor in owned:  # processes that have it mapped keep their mapping
                path.unlink(missing_ok=True)
                os.close(descriptor)

    def writer(self, src_rank: int) -> ShmWriter:
        """Trainer rank ``src_rank``'s side."""
        return ShmWriter(self, src_rank)

    def reader(self, replica: int, tp_rank: int) -> ShmReader:
        """The side of rank ``tp_rank`` of every engine."""
        return ShmReader(self, tp_rank)

    def begin(self, version: int) -> None:
        """Nothing to do: writers mark their own beginning."""

    def publish(self, version: int) -> None:
        """Nothing to do: readers see each writer's end."""

    def content_digests(self, written: Mapping[int, bytes]) -> list[str]:
        """Per engine rank, from all writers' checksums."""
        return segment.content_digests(self.cargo, written)


def _own(path: Path) -> int:
    """A new, locked file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise StagingError(f"{path} belongs to a run that is alive; give this run another name") from None
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def remove_abandoned() -> list[Path]:
    """Remove and return the segments whose owner is dead."""
    removed = []
    for path in sorted(FOLDER.glob("megarl-*-d*")):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:  # another user's, or gone
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_size:  # an empty one is being made right now
                path.unlink(missing_ok=True)
                removed.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


def _require_space(needed: int) -> None:
    stat = os.statvfs(FOLDER)
    free = stat.f_bavail * stat.f_frsize
    if needed > free:
        raise StagingError(
            f"the weights need {needed:,} bytes of shared memory and {FOLDER} has {free:,} free; enlarge it "
            f"(docker run --shm-size={math.ceil(needed / 2**30) + 1}g, or mount -o remount,size=... {FOLDER}), "
            "or use rollout.dtype=bf16"
        )


class ShmWriter:
    """One trainer rank's side."""

    def __init__(self, transport: SharedMemory, src_rank: int) -> None:
        self._rank = src_rank
        self._segments = []
        for dst_rank in range(len(transport.cargo.plan.shapes)):
            ops = {n: op for n, op in transport.cargo.ops(dst_rank).items() if op.src_rank == src_rank}
            if ops:
                self._segments.append((Segment(transport.path(dst_rank), transport.cargo, dst_rank), ops))

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Written:
        """Write all this rank sources."""
        written = Written()
        for target, ops in self._segments:
            written |= target.write(version, self._rank, ops, tensors)
        return written

    def close(self) -> None:
        """Unmap."""
        self._segments = []


class ShmReader:
    """One engine rank's side."""

    def __init__(self, transport: SharedMemory, dst_rank: int) -> None:
        self._ops = transport.cargo.ops(dst_rank)
        self._segment = Segment(transport.path(dst_rank), transport.cargo, dst_rank)

    def receive(self, version: int, timeout_s: float) -> str:
        """Wait for ``version`` and check every byte; the digest of this rank's content."""
        self._segment.wait_for(version, timeout_s)
        digest = self._segment.verify(self._ops)
        self._segment.wait_for(version, 0.0)  # nothing newer came meanwhile
        return digest

    def parameters(self) -> dict[str, Tensor]:
        """Views of shared memory: copy them, the next sync overwrites them."""
        return self._segment.parameters()

    def close(self) -> None:
        """Nothing to do: the mapping ends with its last view."""
