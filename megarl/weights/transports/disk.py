"""Weights through a folder that all processes see: slower, and it outlives every process.

    <folder>/v<version>/d<rank>      one file per engine rank (``segment.py``)
    <folder>/v<version>.tmp/         while it is written

A version appears by one rename, and the newest few are kept. So an engine that starts again, or later than the others,
catches up from here.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from megarl.weights.transports import segment
from megarl.weights.transports.segment import Segment, layout_of
from megarl.weights.transports.transport import Cargo, StagingError, Written

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Disk:
    """A ``Transport`` over a folder.

    Example: ``Disk(Path("runs/moe-grpo/weights"), Cargo(plan, "bf16"))``
    """

    folder: Path
    cargo: Cargo
    keep: int = 2
    """Published versions that stay."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, and remove what a killed run left half-written.

        Raises:
            StagingError: the disk has too little room for one version more than is kept.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for scratch in self.folder.glob("v*.tmp"):
            shutil.rmtree(scratch)
        needed = (self.keep + 1 - len(self.versions())) * sum(layout.size for layout in self._layouts())
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise StagingError(
                f"the weights need {needed:,} bytes and the disk of {self.folder} has {free:,} free; use another output"
            )
        yield

    def _layouts(self) -> list[segment.SegmentLayout]:
        return [layout_of(self.cargo, rank) for rank in range(len(self.cargo.plan.shapes))]

    def versions(self) -> list[int]:
        """Published versions, ascending."""
        names = (re.fullmatch(r"v(\d+)", path.name) for path in self.folder.glob("v*"))
        return sorted(int(name.group(1)) for name in names if name)

    def file(self, version: int, dst_rank: int, *, published: bool = True) -> Path:
        """The file of engine rank ``dst_rank``."""
        return self.folder / (f"v{version}" if published else f"v{version}.tmp") / f"d{dst_rank}"

    def begin(self, version: int) -> None:
        """Make the files of ``version``, empty."""
        scratch = self.file(version, 0, published=False).parent
        for leftover in (scratch, self.file(version, 0).parent):  # an earlier life of this run may have published it
            shutil.rmtree(leftover, ignore_errors=True)
        scratch.mkdir()
        for dst_rank, layout in enumerate(self._layouts()):
            descriptor = os.open(self.file(version, dst_rank, published=False), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                segment.create(descriptor, layout, self.cargo.plan)
            finally:
                os.close(descriptor)

    def publish(self, version: int) -> None:
        """Let ``version`` appear and the oldest go."""
        scratch = self.file(version, 0, published=False).parent
        for file in scratch.iterdir():
            _flush(file)
        _flush(scratch)
        scratch.rename(self.file(version, 0).parent)
        _flush(self.folder)
        for old in self.versions()[: -self.keep]:
            shutil.rmtree(self.file(old, 0).parent)

    def writer(self, src_rank: int) -> DiskWriter:
        """Trainer rank ``src_rank``'s side."""
        return DiskWriter(self, src_rank)

    def reader(self, replica: int, tp_rank: int) -> DiskReader:
        """The side of rank ``tp_rank`` of every engine."""
        return DiskReader(self, tp_rank)

    def content_digests(self, written: Mapping[int, bytes]) -> list[str]:
        """Per engine rank, from all writers' checksums."""
        return segment.content_digests(self.cargo, written)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DiskWriter:
    """One trainer rank's side."""

    def __init__(self, transport: Disk, src_rank: int) -> None:
        self._disk, self._rank = transport, src_rank
        self._ops = {}
        for dst_rank in range(len(transport.cargo.plan.shapes)):
            ops = {n: op for n, op in transport.cargo.ops(dst_rank).items() if op.src_rank == src_rank}
            if ops:
                self._ops[dst_rank] = ops

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Written:
        """Write all this rank sources."""
        written = Written()
        for dst_rank, ops in self._ops.items():
            target = Segment(self._disk.file(version, dst_rank, published=False), self._disk.cargo, dst_rank)
            written |= target.write(version, self._rank, ops, tensors)
        return written

    def close(self) -> None:
        """Nothing is held."""


class DiskReader:
    """One engine rank's side."""

    def __init__(self, transport: Disk, dst_rank: int) -> None:
        self._disk, self._rank = transport, dst_rank
        self._segment: Segment | None = None

    def receive(self, version: int, timeout_s: float) -> str:
        """Wait until ``version`` is published and check every byte; the digest of this rank's content."""
        path, deadline = self._disk.file(version, self._rank), time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise StagingError(f"version {version} is not staged: {path} did not appear within {timeout_s:g} s")
            time.sleep(_POLL_S)
        self._segment = Segment(path, self._disk.cargo, self._rank)
        self._segment.wait_for(version, 0.0)
        return self._segment.verify(self._disk.cargo.ops(self._rank))

    def parameters(self) -> dict[str, Tensor]:
        """Views of the file."""
        if self._segment is None:
            raise StagingError("no version was received yet")
        return self._segment.parameters()

    def close(self) -> None:
        """Nothing to do: the mapping ends with its last view."""
