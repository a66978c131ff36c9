"""Weights from process to process over torch.distributed: Gloo on CPUs, NCCL on GPUs.

Trainer and engine ranks meet in a process group of their own, beside those of Megatron and vLLM. What a trainer rank
sends to an engine rank is packed into buckets. Everybody works through all buckets in one order that is the same
everywhere, so nobody ever waits for somebody who waits for him; a sender keeps two buckets under way.

Every replica of an engine is a destination of its own: the plan has ``replicas x tensor_parallel`` engine ranks, and
each draws from other data-parallel copies of the trainer.

    a bucket:  8 bytes version | 16 bytes checksum of the rest, taken from the live shards | rectangles, one by one
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.weights.plan import Op
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

BUCKET_BYTES = 16 * 2**20
_ALIGNMENT = 8
_dist: Any = dist  # its stubs leave out the stores and the backends' classes
_VERSION_BYTES = 8
_HEAD_BYTES = _VERSION_BYTES + DIGEST_BYTES
_UNDER_WAY = 2


@dataclass(frozen=True, slots=True)
class Bucket:
    """What goes in one message."""

    number: int
    """Place in the common order, and the message's tag."""
    src_rank: int
    dst_rank: int
    ops: tuple[Op, ...]
    num_bytes: int
    """Without the head."""


def buckets_of(cargo: Cargo, max_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """All buckets of one sync in the common order: the first ones of all pairs, then the second ones, and so on."""
    pairs: dict[tuple[int, int], list[list[Op]]] = defaultdict(list)
    filled: dict[tuple[int, int], int] = defaultdict(int)
    for op in cargo.plan.ops:
        pair, size = (op.src_rank, op.dst_rank), _num_bytes(cargo, op)
        if not pairs[pair] or filled[pair] + size > max_bytes:
            pairs[pair].append([])
            filled[pair] = 0
        pairs[pair][-1].append(op)
        filled[pair] += size
    order = sorted((turn, dst, src) for (src, dst), groups in pairs.items() for turn in range(len(groups)))
    found = []
    for number, (turn, dst, src) in enumerate(order):
        ops = tuple(pairs[src, dst][turn])
        found.append(Bucket(number, src, dst, ops, sum(_num_bytes(cargo, op) for op in ops)))
    return found


def _num_bytes(cargo: Cargo, op: Op) -> int:
    """With what fills it up to the next aligned place."""
    return -(-op.dst_rect.area * cargo.dtype_of(op.dst_param).itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class PointToPoint:
    """A ``Transport`` between processes anywhere.

    Example: ``PointToPoint("10.0.0.5:29511", Cargo(plan, "bf16"), num_sources=8, tensor_parallel=2, timeout_s=600)``
    """

    endpoint: str
    """``host:port`` where all meet; trainer rank 0 listens there."""
    cargo: Cargo
    num_sources: int
    """Trainer ranks."""
    tensor_parallel: int
    timeout_s: float
    """Deadline of meeting and of every message."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Nothing to make ready."""
        yield

    def writer(self, src_rank: int) -> P2pWriter:
        """Trainer rank ``src_rank``'s side; returns when all have met."""
        return P2pWriter(self, src_rank)

    def reader(self, replica: int, tp_rank: int) -> P2pReader:
        """The side of rank ``tp_rank`` of engine ``replica``; returns when all have met."""
        return P2pReader(self, replica * self.tensor_parallel + tp_rank)

    def begin(self, version: int) -> None:
        """Nothing to do."""

    def publish(self, version: int) -> None:
        """Nothing to do."""

    def content_digests(self, written: Mapping[int, bytes]) -> list[str]:
        """Per engine rank, from all senders' checksums of buckets."""
        numbers: list[list[int]] = [[] for _ in self.cargo.plan.shapes]
        for bucket in buckets_of(self.cargo):
            numbers[bucket.dst_rank].append(bucket.number)
        return [content_digest(written, own) for own in numbers]

    def meet(self, rank: int) -> dist.ProcessGroup:
        """The process group; trainer ranks come first, then engine ranks.

        Raises:
            StagingError: not all came in time.
        """
        host, _, port = self.endpoint.rpartition(":")
        size, timeout = self.num_sources + len(self.cargo.plan.shapes), timedelta(seconds=self.timeout_s)
        try:
            store = _dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
            return _process_group(_dist.PrefixStore("megarl-weights", store), rank, size, timeout, host)
        except (RuntimeError, dist.DistError) as error:
            raise StagingError(f"rank {rank} of {size} did not meet the others at {self.endpoint}: {error}") from error


def _process_group(store: Any, rank: int, size: int, timeout: timedelta, host: str) -> dist.ProcessGroup:
    if torch.cuda.is_available():
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return cast("dist.ProcessGroup", _dist.ProcessGroupNCCL(store, rank, size, options))
    gloo = _dist.ProcessGroupGloo
    options = gloo._Options()
    is_local = host in ("127.0.0.1", "localhost")
    options._devices = [gloo.create_device(hostname=host) if is_local else gloo.create_default_device()]
    options._timeout = timeout
    return cast("dist.ProcessGroup", gloo(store, rank, size, options))


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class P2pWriter:
    """One trainer rank's side."""

    def __init__(self, transport: PointToPoint, src_rank: int) -> None:
        self._transport, self._cargo = transport, transport.cargo
        self._buckets = [bucket for bucket in buckets_of(self._cargo) if bucket.src_rank == src_rank]
        self._group = transport.meet(src_rank)

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Written:
        """Send all buckets this rank sources."""
        under_way: deque[tuple[Bucket, Tensor, dist.Work]] = deque()
        written = Written()
        for bucket in self._buckets:
            if len(under_way) == _UNDER_WAY:
                self._wait(*under_way.popleft())
            message, written.checksums[bucket.number] = self._packed(bucket, version, tensors)
            written.num_bytes += bucket.num_bytes
            target = self._transport.num_sources + bucket.dst_rank
            under_way.append((bucket, message, self._group.send([message], target, bucket.number)))
        for sent in under_way:
            self._wait(*sent)
        return written

    def _packed(self, bucket: Bucket, version: int, tensors: Mapping[str, Tensor]) -> tuple[Tensor, bytes]:
        message = torch.zeros(_HEAD_BYTES + bucket.num_bytes, dtype=torch.uint8, device=_device())
        for op, part in _pieces(self._cargo, bucket, message):
            part.copy_(source_of(op, tensors))
        digest = checksum(message[_HEAD_BYTES:].cpu())
        head = version.to_bytes(_VERSION_BYTES, "little", signed=True) + digest
        message[:_HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return message, digest

    def _wait(self, bucket: Bucket, message: Tensor, work: dist.Work) -> None:
        try:
            work.wait(timedelta(seconds=self._transport.timeout_s))
        except RuntimeError as error:
            raise StagingError(f"engine rank {bucket.dst_rank} did not take bucket {bucket.number}: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        self._group.shutdown()


class P2pReader:
    """One engine rank's side; holds its own shard once."""

    def __init__(self, transport: PointToPoint, dst_rank: int) -> None:
        self._transport, self._cargo = transport, transport.cargo
        self._buckets = [bucket for bucket in buckets_of(self._cargo) if bucket.dst_rank == dst_rank]
        expected = self._cargo.expected(dst_rank)
        self._parameters = {name: torch.zeros(s, dtype=t, device=_device()) for name, (s, t) in expected.items()}
        self._group = transport.meet(transport.num_sources + dst_rank)

    def receive(self, version: int, timeout_s: float) -> str:
        """Take all buckets and check them; the digest of this rank's content."""
        checksums = {bucket.number: self._take(bucket, version, timeout_s) for bucket in self._buckets}
        return content_digest(checksums, checksums)

    def _take(self, bucket: Bucket, version: int, timeout_s: float) -> bytes:
        message = torch.empty(_HEAD_BYTES + bucket.num_bytes, dtype=torch.uint8, device=_device())
        try:
            self._group.recv([message], bucket.src_rank, bucket.number).wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise StagingError(
                f"bucket {bucket.number} of version {version} did not come from trainer rank {bucket.src_rank} within "
                f"{timeout_s:g} s: {error}"
            ) from error
        head = bytes(message[:_HEAD_BYTES].cpu().numpy())
        found, expected = checksum(message[_HEAD_BYTES:].cpu()), head[_VERSION_BYTES:]
        sent_version = int.from_bytes(head[:_VERSION_BYTES], "little", signed=True)
        if sent_version != version:
            raise StagingError(f"trainer rank {bucket.src_rank} sent version {sent_version}, not {version}")
        if found != expected:
            names = ", ".join(dict.fromkeys(op.hf_name for op in bucket.ops[:3]))
            raise StagingError(
                f"checksum of bucket {bucket.number} ({names}, ..., trainer rank {bucket.src_rank}) is {found.hex()}, "
                f"the trainer sent {expected.hex()}"
            )
        for op, part in _pieces(self._cargo, bucket, message):
            rectangle(self._parameters[op.dst_param], op.dst_rect).copy_(part)
        return found

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters as last received."""
        return self._parameters

    def close(self) -> None:
        """Leave the group."""
        self._group.shutdown()


def _pieces(cargo: Cargo, bucket: Bucket, message: Tensor) -> Sequence[tuple[Op, Tensor]]:
    """Every op of ``bucket`` with its [rows, cols] part of the message."""
    found, start = [], _HEAD_BYTES
    for op in bucket.ops:
        dtype, rect = cargo.dtype_of(op.dst_param), op.dst_rect
        part = message[start : start + rect.area * dtype.itemsize].view(dtype)
        found.append((op, part.view(rect.row1 - rect.row0, rect.col1 - rect.col0)))
        start += _num_bytes(cargo, op)
    return found
