"""Weights through shared memory: one segment per engine rank, already in that rank's layout.

Every trainer rank writes the rectangles it sources straight into ``/dev/shm/megarl-<run>-d<rank>``; the engine rank
maps its segment and finds its parameters whole. Nothing is gathered, and each byte is written once and read once.
All replicas of an engine read the same segments, and the segments are used again by every sync: fresh pages cost
twice the time of touched ones.

    header      64 bytes     magic and a digest of the plan
    versions    int64 each   one per trainer rank that writes here: -1 while it writes, then the version, written last
    digests     16 each      one per op of this rank, taken from the live shard
    parameters               64-byte aligned, in the engine's dtype; what no op covers (vocabulary padding) stays zero

Both sides derive all offsets from the plan, so nothing but the plan and a name travels between them.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
from blake3 import blake3
from torch import Tensor

from megarl.weights.plan import Op, Plan, Rect

FOLDER = Path("/dev/shm")
DTypeName = Literal["fp32", "bf16"]
DTYPES: dict[DTypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

_MAGIC = b"megarl01"
_ALIGNMENT = 64
_HEADER_BYTES = 64
_DIGEST_BYTES = 16
_WRITING = -1


class StagingError(RuntimeError):
    """Staged weights that must not be used, or a segment that is not there."""


@dataclass(frozen=True, slots=True)
class StagingArea:
    """Names the segments of one run and says what lies in them; small enough to send to every process.

    Example: ``StagingArea("moe-grpo-4711", plan, "bf16")``
    """

    run: str
    """Unique among the runs alive on the machine."""
    plan: Plan
    dtype: DTypeName

    @property
    def num_segments(self) -> int:
        """One per engine rank."""
        return len(self.plan.shapes)

    def path(self, dst_rank: int) -> Path:
        """The segment of engine rank ``dst_rank``."""
        return FOLDER / f"megarl-{self.run}-d{dst_rank}"

    def ops(self, dst_rank: int) -> dict[int, Op]:
        """The ops that fill engine rank ``dst_rank``, by their number in the plan."""
        return {number: op for number, op in enumerate(self.plan.ops) if op.dst_rank == dst_rank}


# --- layout: pure ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies."""

    offset: int
    """Bytes from the start of the segment."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Every offset of one segment, in bytes."""

    slots: dict[str, Slot]
    sources: tuple[int, ...]
    """Trainer ranks that write here, ascending: the order of the version slots."""
    op_numbers: tuple[int, ...]
    """Ops that fill this segment, ascending: the order of the digest table."""
    digests_offset: int
    size: int


def layout_of(area: StagingArea, dst_rank: int) -> SegmentLayout:
    """The layout of engine rank ``dst_rank``'s segment."""
    ops = area.ops(dst_rank)
    sources = tuple(sorted({op.src_rank for op in ops.values()}))
    digests_offset = _aligned(_HEADER_BYTES + 8 * len(sources))
    end = _aligned(digests_offset + _DIGEST_BYTES * len(ops))
    slots = {}
    for name, shape in area.plan.shapes[dst_rank].items():
        slots[name] = Slot(end, shape)
        end = _aligned(end + math.prod(shape) * DTYPES[area.dtype].itemsize)
    return SegmentLayout(slots, sources, tuple(ops), digests_offset, end)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def content_digest(digests: Mapping[int, bytes], num_ops: int) -> str:
    """One digest over all ops of a plan, in plan order; equal on both sides when every byte is.

    Raises:
        StagingError: an op has no digest.
    """
    missing = [number for number in range(num_ops) if number not in digests]
    if missing:
        raise StagingError(f"{len(missing)} of {num_ops} ops were not written, the first is op {missing[0]}")
    return blake3(b"".join(digests[number] for number in range(num_ops))).hexdigest()


# --- lifetime --------------------------------------------------------------------------------------------------------


class OwnedSegments:
    """The segments of one run, for as long as their owner lives.

    The owner holds a lock on every segment. A lock dies with its process, so segments of a killed run are known by
    being unlocked, and the next ``create`` removes them.
    """

    def __init__(self, paths: list[Path], descriptors: list[int]) -> None:
        self._paths, self._descriptors = paths, descriptors

    @classmethod
    def create(cls, area: StagingArea) -> Self:
        """Reserve the memory of all segments.

        Raises:
            StagingError: /dev/shm has too little room.
        """
        remove_abandoned()
        layouts = [layout_of(area, rank) for rank in range(area.num_segments)]
        _require_space(sum(layout.size for layout in layouts))
        owned = cls([], [])
        try:
            for rank, layout in enumerate(layouts):
                owned._add(area.path(rank), layout.size, _header(area.plan))
        except BaseException:
            owned.close()
            raise
        return owned

    def _add(self, path: Path, size: int, header: bytes) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise StagingError(f"{path} belongs to a run that is alive; give this run another name") from None
        self._paths.append(path)
        self._descriptors.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.posix_fallocate(descriptor, 0, size)  # reserves: a write can then never fail for lack of memory
        os.pwrite(descriptor, header, 0)

    def close(self) -> None:
        """Remove the segments. Processes that have them mapped keep their mapping."""
        for path, descriptor in zip(self._paths, self._descriptors, strict=True):
            path.unlink(missing_ok=True)
            os.close(descriptor)
        self._paths, self._descriptors = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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


def _header(plan: Plan) -> bytes:
    return _MAGIC + blake3(plan.digest.encode()).digest()


# --- both sides ------------------------------------------------------------------------------------------------------


class _Segment:
    """Tensors over one mapped segment."""

    def __init__(self, area: StagingArea, dst_rank: int) -> None:
        self.path = area.path(dst_rank)
        self.layout = layout_of(area, dst_rank)
        self._dtype = DTYPES[area.dtype]
        self._bytes = self._map(_header(area.plan))
        versions_end = _HEADER_BYTES + 8 * len(self.layout.sources)
        digests_end = self.layout.digests_offset + _DIGEST_BYTES * len(self.layout.op_numbers)
        self._versions = self._bytes[_HEADER_BYTES:versions_end].view(torch.int64)
        self._digests = self._bytes[self.layout.digests_offset : digests_end].view(-1, _DIGEST_BYTES)

    def _map(self, header: bytes) -> Tensor:
        size = self.path.stat().st_size if self.path.exists() else None
        if size != self.layout.size:
            raise StagingError(f"{self.path} should have {self.layout.size} bytes and has {size}")
        mapped = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        if bytes(mapped[: len(header)].numpy()) != header:
            raise StagingError(f"{self.path} was made for another weight plan")
        return mapped

    def parameter(self, name: str) -> Tensor:
        """The parameter in its own shape, as a view of the segment."""
        slot = self.layout.slots[name]
        end = slot.offset + math.prod(slot.shape) * self._dtype.itemsize
        return self._bytes[slot.offset : end].view(self._dtype).view(slot.shape)

    def versions(self) -> dict[int, int]:
        """The version each trainer rank wrote last."""
        return dict(zip(self.layout.sources, self._versions.tolist(), strict=True))

    def set_version(self, source: int, version: int) -> None:
        self._versions[self.layout.sources.index(source)] = version

    def digests(self) -> dict[int, bytes]:
        """The digest each op's writer took, by the op's number."""
        table = self._digests.numpy()
        return {number: bytes(table[row]) for row, number in enumerate(self.layout.op_numbers)}

    def set_digests(self, digests: Mapping[int, bytes]) -> None:
        rows = {number: row for row, number in enumerate(self.layout.op_numbers)}
        for number, digest in digests.items():
            self._digests[rows[number]] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _rectangle(tensor: Tensor, rect: Rect) -> Tensor:
    """The rectangle of the 2-D view that ``Rect`` describes; raises IndexError when it does not fit."""
    matrix = tensor.view(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    part = matrix[rect.row0 : rect.row1, rect.col0 : rect.col1]
    if part.shape != (rect.row1 - rect.row0, rect.col1 - rect.col0):
        raise IndexError(f"{rect} does not fit into a tensor of shape {tuple(tensor.shape)}")
    return part


def _digest(contiguous: Tensor) -> bytes:
    return blake3(contiguous.view(-1).view(torch.uint8).numpy().data).digest(_DIGEST_BYTES)


# --- trainer side ----------------------------------------------------------------------------------------------------


class ShmWriter:
    """One trainer rank's side."""

    def __init__(self, area: StagingArea, src_rank: int) -> None:
        self._rank, self._dtype = src_rank, DTYPES[area.dtype]
        self._ops = {
            dst_rank: {number: op for number, op in area.ops(dst_rank).items() if op.src_rank == src_rank}
            for dst_rank in range(area.num_segments)
        }
        self._segments = {dst_rank: _Segment(area, dst_rank) for dst_rank, ops in self._ops.items() if ops}

    def write(self, version: int, params: Mapping[str, Tensor]) -> dict[int, bytes]:
        """Write all this rank sources, cast to the engine's dtype; {op number: digest of what the shard holds}.

        ``params`` are the live shards by name and must not change until this returns.

        Raises:
            StagingError: a shard the plan names is missing or too small; the segments then hold no version.
        """
        written: dict[int, bytes] = {}
        for dst_rank, segment in self._segments.items():
            segment.set_version(self._rank, _WRITING)
            digests = {number: self._copy(op, params, segment) for number, op in self._ops[dst_rank].items()}
            segment.set_digests(digests)
            segment.set_version(self._rank, version)
            written |= digests
        return written

    def _copy(self, op: Op, params: Mapping[str, Tensor], segment: _Segment) -> bytes:
        try:
            source = _rectangle(params[op.src_param].detach(), op.src_rect)
        except (KeyError, IndexError) as error:
            raise StagingError(
                f"trainer rank {self._rank} cannot send {op.hf_name} from {op.src_param}: {error}"
            ) from error
        piece = source.to(device="cpu", dtype=self._dtype).contiguous()
        _rectangle(segment.parameter(op.dst_param), op.dst_rect).copy_(piece)
        return _digest(piece)


# --- engine side -----------------------------------------------------------------------------------------------------


class ShmReader:
    """One engine rank's side. It maps all segments, to prove the whole version and not its own share alone."""

    def __init__(self, area: StagingArea, dst_rank: int) -> None:
        self._ops = area.ops(dst_rank)
        self._num_ops = len(area.plan.ops)
        self._segments = [_Segment(area, rank) for rank in range(area.num_segments)]
        self._own = self._segments[dst_rank]

    def require_version(self, version: int) -> None:
        """Raises StagingError unless every trainer rank has finished writing ``version`` and nothing newer."""
        for segment in self._segments:
            for source, found in segment.versions().items():
                if found != version:
                    state = "is still writing" if found == _WRITING else f"last wrote version {found}"
                    raise StagingError(
                        f"version {version} is not staged in {segment.path}: trainer rank {source} {state}"
                    )

    def verify(self, version: int) -> str:
        """Check every byte of this rank against the digests its writers took; the content digest of all ranks.

        Raises:
            StagingError: the version is not there, or a rectangle differs from what left the trainer.
        """
        self.require_version(version)
        for number, expected in self._own.digests().items():
            op = self._ops[number]
            found = _digest(_rectangle(self._own.parameter(op.dst_param), op.dst_rect).contiguous())
            if found != expected:
                raise StagingError(
                    f"checksum of {op.dst_param} {op.dst_rect} (from {op.hf_name}, trainer rank {op.src_rank}) is "
                    f"{found.hex()}, the trainer sent {expected.hex()}"
                )
        self.require_version(version)
        digests = {number: digest for segment in self._segments for number, digest in segment.digests().items()}
        return content_digest(digests, self._num_ops)

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters as views of shared memory: copy them, the next sync overwrites them."""
        return {name: self._own.parameter(name) for name in self._own.layout.slots}
