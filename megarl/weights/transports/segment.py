"""A file that holds one engine rank's weights, already in that rank's layout: shared memory and disk write it.

Every trainer rank writes the rectangles it sources straight into the file; the engine rank maps it and finds its
parameters whole. Nothing is gathered, and each byte is written once and read once.

    header      64 bytes     magic and a digest of the plan
    versions    int64 each   one per trainer rank that writes here: -1 while it writes, then the version, written last
    checksums   16 each      one per op of this rank, taken from the live shard
    parameters               64-byte aligned, in the engine's dtype; what no op covers (vocabulary padding) stays zero

Both sides derive all offsets from the plan, so nothing but the plan and a path travels between them.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from megarl.weights.plan import Op, Plan
from megarl.weights.transports.transport import (
    DIGEST_BYTES,
    Cargo,
    StagingError,
    Written,
    checksum,
    content_digest,
    rectangle,
    source_of,
)

_MAGIC = b"megarl02"
_ALIGNMENT = 64
_HEADER_BYTES = 64
_WRITING = -1
_POLL_S = 0.002


# --- layout: pure ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies."""

    offset: int
    """Bytes from the start of the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Every offset of one file, in bytes."""

    slots: dict[str, Slot]
    sources: tuple[int, ...]
    """Trainer ranks that write here, ascending: the order of the version slots."""
    op_numbers: tuple[int, ...]
    """Ops that fill this file, ascending: the order of the checksum table."""
    checksums_offset: int
    size: int


def layout_of(cargo: Cargo, dst_rank: int) -> SegmentLayout:
    """The layout of engine rank ``dst_rank``'s file."""
    ops = cargo.ops(dst_rank)
    sources = tuple(sorted({op.src_rank for op in ops.values()}))
    checksums_offset = _aligned(_HEADER_BYTES + 8 * len(sources))
    end = _aligned(checksums_offset + DIGEST_BYTES * len(ops))
    slots = {}
    for name, (shape, dtype) in cargo.expected(dst_rank).items():
        slots[name] = Slot(end, shape, dtype)
        end = _aligned(slots[name].end)
    return SegmentLayout(slots, sources, tuple(ops), checksums_offset, end)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def content_digests(cargo: Cargo, written: Mapping[int, bytes]) -> list[str]:
    """``Transport.content_digests`` where a piece is an op."""
    return [content_digest(written, cargo.ops(rank)) for rank in range(len(cargo.plan.shapes))]


# --- the file --------------------------------------------------------------------------------------------------------


def create(descriptor: int, layout: SegmentLayout, plan: Plan) -> None:
    """Reserve the room of an open, empty file, so that a write can then never fail for lack of it; all zero."""
    os.posix_fallocate(descriptor, 0, layout.size)
    versions = struct.pack("<q", _WRITING) * len(layout.sources)  # zero would be a version
    os.pwrite(descriptor, _header(plan).ljust(_HEADER_BYTES, b"\0") + versions, 0)


def _header(plan: Plan) -> bytes:
    return _MAGIC + blake3(plan.digest.encode()).digest()


class Segment:
    """Tensors over one mapped file."""

    def __init__(self, path: Path, cargo: Cargo, dst_rank: int) -> None:
        """Raises StagingError when the file is missing, short or of another plan."""
        self.path = path
        self.layout = layout_of(cargo, dst_rank)
        self._bytes = self._map(_header(cargo.plan))
        versions_end = _HEADER_BYTES + 8 * len(self.layout.sources)
        checksums_end = self.layout.checksums_offset + DIGEST_BYTES * len(self.layout.op_numbers)
        self._versions = self._bytes[_HEADER_BYTES:versions_end].view(torch.int64)
        self._checksums = self._bytes[self.layout.checksums_offset : checksums_end].view(-1, DIGEST_BYTES)

    def _map(self, header: bytes) -> Tensor:
        size = self.path.stat().st_size if self.path.exists() else None
        if size != self.layout.size:
            raise StagingError(f"{self.path} should have {self.layout.size} bytes and has {size}")
        mapped = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        if bytes(mapped[: len(header)].numpy()) != header:
            raise StagingError(f"{self.path} was made for another weight plan")
        return mapped

    def parameter(self, name: str) -> Tensor:
        """The parameter in its own shape, as a view of the file."""
        slot = self.layout.slots[name]
        return self._bytes[slot.offset : slot.end].view(slot.dtype).view(slot.shape)

    def parameters(self) -> dict[str, Tensor]:
        """All of them."""
        return {name: self.parameter(name) for name in self.layout.slots}

    def versions(self) -> dict[int, int]:
        """The version each trainer rank wrote last."""
        return dict(zip(self.layout.sources, self._versions.tolist(), strict=True))

    def checksums(self) -> dict[int, bytes]:
        """The checksum each op's writer took, by the op's number."""
        table = self._checksums.numpy()
        return {number: bytes(table[row]) for row, number in enumerate(self.layout.op_numbers)}

    def write(self, version: int, src_rank: int, ops: Mapping[int, Op], tensors: Mapping[str, Tensor]) -> Written:
        """Write the ops of one trainer rank. When it fails half-way the file has no version."""
        place = self.layout.sources.index(src_rank)
        rows = {number: row for row, number in enumerate(self.layout.op_numbers)}
        self._versions[place] = _WRITING
        written = Written()
        for number, op in ops.items():
            target = rectangle(self.parameter(op.dst_param), op.dst_rect)
            piece = source_of(op, tensors).to(device="cpu", dtype=target.dtype).contiguous()
            target.copy_(piece)
            digest = written.checksums[number] = checksum(piece)
            written.num_bytes += piece.nbytes
            self._checksums[rows[number]] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        self._versions[place] = version
        return written

    def wait_for(self, version: int, timeout_s: float) -> None:
        """Until every trainer rank has written ``version``.

        Raises:
            StagingError: naming the rank that has not within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            late = {source: found for source, found in self.versions().items() if found != version}
            if not late:
                return
            if time.monotonic() > deadline:
                source, found = next(iter(late.items()))
                state = "is still writing" if found == _WRITING else f"last wrote version {found}"
                raise StagingError(
                    f"version {version} is not staged in {self.path} after {timeout_s:g} s: "
                    f"trainer rank {source} {state}"
                )
            time.sleep(_POLL_S)

    def verify(self, ops: Mapping[int, Op]) -> str:
        """Check every byte against the writers' checksums; the digest of the content.

        Raises:
            StagingError: a rectangle differs from what left the trainer.
        """
        expected = self.checksums()
        for number, op in ops.items():
            found = checksum(rectangle(self.parameter(op.dst_param), op.dst_rect).contiguous())
            if found != expected[number]:
                raise StagingError(
                    f"checksum of {op.dst_param} {op.dst_rect} (from {op.hf_name}, trainer rank {op.src_rank}) is "
                    f"{found.hex()}, the trainer sent {expected[number].hex()}"
                )
        return content_digest(expected, self.layout.op_numbers)
