"""How staged weights get from trainer ranks to engine ranks: one Protocol, several ways.

A ``Transport`` is small and is sent to every process, which makes its own side of it. In one sync

    driver          begin(version)
    trainer ranks   writer.write(version, tensors)     live shards, cast to the engine's number format, with checksums
    engine ranks    reader.receive(version)            at the same time; the same checksums from what arrived
    driver          publish(version)

and the parameters an engine rank then reads are whole, in its own layout. Nothing of it touches the weights that are
being served, so generation goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from megarl.weights.plan import Op, Plan, Rect

DTypeName = Literal["fp32", "bf16"]
DTYPES: dict[DTypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
DIGEST_BYTES = 16


class StagingError(RuntimeError):
    """Staged weights that must not be used, or that are not there."""


@dataclass(slots=True)
class Written:
    """What one trainer rank sent in one sync."""

    checksums: dict[int, bytes] = field(default_factory=dict)
    """{number of the piece: checksum of the live shard}"""
    num_bytes: int = 0
    """Of weights, as counted while they were sent."""

    def __ior__(self, other: Written) -> Written:
        """Add what another rank, or another file, got."""
        self.checksums |= other.checksums
        self.num_bytes += other.num_bytes
        return self


class Writer(Protocol):
    """One trainer rank's side."""

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Written:
        """Send all this rank sources, cast to the engine's dtype.

        ``tensors`` are the live shards by name and must not change until this returns.

        Raises:
            StagingError: a shard the plan names is missing or too small, or nobody took what was sent.
        """
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Reader(Protocol):
    """One engine rank's side."""

    def receive(self, version: int, timeout_s: float) -> str:
        """Wait for ``version``, check every byte against the writers' checksums; the digest of this rank's content.

        Raises:
            StagingError: it did not come in time, or a piece differs from what left the trainer.
        """
        ...

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters as last received: copy them, the next sync overwrites them."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Transport(Protocol):
    """The driver's side, and how the other sides are made."""

    @property
    def cargo(self) -> Cargo:
        """What is moved."""
        ...

    def opened(self) -> AbstractContextManager[None]:
        """While inside, writers and readers may be made. Raises StagingError when there is too little room."""
        ...

    def writer(self, src_rank: int) -> Writer:
        """Trainer rank ``src_rank``'s side."""
        ...

    def reader(self, replica: int, tp_rank: int) -> Reader:
        """The side of rank ``tp_rank`` of engine ``replica``."""
        ...

    def begin(self, version: int) -> None:
        """Make ready for ``version``, before anyone writes."""
        ...

    def publish(self, version: int) -> None:
        """All ranks wrote ``version``."""
        ...

    def content_digests(self, written: Mapping[int, bytes]) -> list[str]:
        """Per engine rank of the plan, what ``Reader.receive`` must return; from all writers' checksums.

        Raises:
            StagingError: a piece was not written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Cargo:
    """What is moved and in which number format."""

    plan: Plan
    dtype: DTypeName

    def dtype_of(self, param: str) -> torch.dtype:
        """The number format in which the engine keeps ``param``."""
        return torch.float32 if param in self.plan.fp32 else DTYPES[self.dtype]

    def ops(self, dst_rank: int) -> dict[int, Op]:
        """The ops that fill engine rank ``dst_rank``, by their number in the plan."""
        return {number: op for number, op in enumerate(self.plan.ops) if op.dst_rank == dst_rank}

    def expected(self, dst_rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """{parameter: (shape, number format)} of engine rank ``dst_rank``."""
        return {name: (shape, self.dtype_of(name)) for name, shape in self.plan.shapes[dst_rank].items()}


def rectangle(tensor: Tensor, rect: Rect) -> Tensor:
    """The rectangle of the 2-D view that ``Rect`` describes; raises IndexError when it does not fit."""
    matrix = tensor.view(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    part = matrix[rect.row0 : rect.row1, rect.col0 : rect.col1]
    if part.shape != (rect.row1 - rect.row0, rect.col1 - rect.col0):
        raise IndexError(f"{rect} does not fit into a tensor of shape {tuple(tensor.shape)}")
    return part


def source_of(op: Op, tensors: Mapping[str, Tensor]) -> Tensor:
    """The part of a live shard that ``op`` sends.

    Raises:
        StagingError: the shard is missing or too small.
    """
    try:
        return rectangle(tensors[op.src_param].detach(), op.src_rect)
    except (KeyError, IndexError) as error:
        raise StagingError(
            f"trainer rank {op.src_rank} cannot send {op.hf_name} from {op.src_param}: {error}"
        ) from error


def checksum(contiguous: Tensor) -> bytes:
    """Of a contiguous CPU tensor's bytes."""
    return blake3(contiguous.view(-1).view(torch.uint8).numpy().data).digest(DIGEST_BYTES)


def content_digest(checksums: Mapping[int, bytes], numbers: Iterable[int]) -> str:
    """One digest over the pieces ``numbers``, in this order; equal on both sides when every byte is.

    Raises:
        StagingError: a piece has no checksum.
    """
    wanted = list(numbers)
    missing = [number for number in wanted if number not in checksums]
    if missing:
        raise StagingError(f"{len(missing)} of {len(wanted)} pieces were not written, the first is {missing[0]}")
    return blake3(b"".join(checksums[number] for number in wanted)).hexdigest()
