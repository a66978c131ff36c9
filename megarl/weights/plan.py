"""Which byte goes where in a weight sync, computed as data and proven before anything moves.

The trainer's shards and the engine's shards are both described in Hugging Face (HF) coordinates (``mappings.py``), so
a plan is their intersection:

    for every tile of an engine shard:   hf_rect of hf_name must come to rect of this shard
      for every trainer tile of hf_name: the common part of both rectangles is one ``Op``

Several trainer ranks may hold the same tile (data-parallel replicas; every tensor-parallel rank has the norms). The op
goes to the one that sends least to this engine rank so far, and on a tie to the next one in a circle that starts at
another place for every engine rank. So the part of an engine rank depends on no other part, and both sides compute the
same plan on their own and compare digests instead of plans.

A plan is proven or not returned: ops and zero fills write every element of every engine shard exactly once, every
rectangle lies inside its shard, and every trainer element was needed, apart from vocabulary padding and the
``unread`` parameters that are copies of others.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megarl.weights.engine_layout import EngineLayout, engine_params, fp32_params
from megarl.weights.mappings import Rect, Shape, ShardSpec, Tile, view_2d
from megarl.weights.megatron_layout import MegatronLayout, Names, megatron_params
from megarl.weights.spec import ModelSpec

__all__ = ["Op", "Plan", "Rect", "Zero", "make_plan", "plan_between"]

Shards = Sequence[Mapping[str, ShardSpec]]
"""[rank]{param: its shard}"""


@dataclass(frozen=True, slots=True)
class Op:
    """Copy one rectangle of a trainer rank's shard into one rectangle of an engine rank's shard."""

    dst_rank: int
    dst_param: str
    dst_rect: Rect
    src_rank: int
    """Trainer world rank; among replicas the one with the fewest elements to send to this engine rank so far."""
    src_param: str
    src_rect: Rect
    hf_name: str
    """What is copied, for messages and checks."""
    hf_rect: Rect


@dataclass(frozen=True, slots=True)
class Zero:
    """Padding of an engine rank's shard, to be written as zeros."""

    dst_rank: int
    dst_param: str
    dst_rect: Rect


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one weight sync does, for every rank of one engine; rectangles are of 2-D views (``view_2d``)."""

    ops: tuple[Op, ...]
    """By engine rank, then in the engine's parameter order."""
    zeros: tuple[Zero, ...]
    shapes: tuple[dict[str, Shape], ...]
    """[engine rank]{param: shape in vLLM's checkpoint layout, before any repacking}"""
    fp32: frozenset[str]
    """Engine parameters that are fp32 whatever the number format of the others."""
    unread: tuple[tuple[int, str], ...]
    """(trainer rank, param) of the copies that need not be sent, such as the last stage's copy of a tied embedding."""
    digest: str
    """sha256 of the canonical form; trainer and engines refuse to talk when theirs differ."""

    def for_source(self, rank: int) -> tuple[Op, ...]:
        """What trainer ``rank`` sends."""
        return tuple(op for op in self.ops if op.src_rank == rank)

    def for_destination(self, rank: int) -> tuple[Op, ...]:
        """What engine ``rank`` receives."""
        return tuple(op for op in self.ops if op.dst_rank == rank)

    def num_bytes(self, dst_rank: int, itemsize: int) -> int:
        """Bytes that move into engine ``dst_rank``: its shards less their padding."""
        sizes = {name: 4 if name in self.fp32 else itemsize for name in self.shapes[dst_rank]}
        return sum(op.dst_rect.area * sizes[op.dst_param] for op in self.ops if op.dst_rank == dst_rank)


def make_plan(
    spec: ModelSpec,
    trainer: MegatronLayout,
    engine: EngineLayout,
    names: Names = "local",
    *,
    replicas: int = 1,
    dst_rank: int | None = None,
) -> Plan:
    """The plan from ``trainer`` to one engine, or to one rank of it, or to several engines.

    Replicas of an engine that read the same memory all follow the plan for one. With ``replicas`` every one has ranks
    of its own, ``replica * tp + tp_rank``, so that they draw from different copies of the trainer's weights.

    Raises:
        ValueError: a layout cannot hold the model.
        AssertionError: the layouts contradict each other; a bug, never a user's mistake.
    """
    sources = [megatron_params(spec, trainer, rank, names) for rank in range(trainer.world_size)]
    ranks = range(replicas * engine.tp) if dst_rank is None else (dst_rank,)
    destinations = {rank: engine_params(spec, engine, rank % engine.tp) for rank in ranks}
    return plan_between(sources, destinations, fp32_params(spec), is_whole=dst_rank is None)


def plan_between(
    sources: Shards,
    destinations: Mapping[int, Mapping[str, ShardSpec]],
    fp32: frozenset[str] = frozenset(),
    *,
    is_whole: bool = True,
) -> Plan:
    """The proven plan from the shards of all trainer ranks to those of the given engine ranks.

    With ``is_whole`` false these are not all of an engine, and that every trainer element is needed is not proven.
    """
    holders = _holders(sources)
    ops = [op for dst_rank, params in destinations.items() for op in _ops_into(dst_rank, params, holders, len(sources))]
    zeros = tuple(
        Zero(rank, param, rect)
        for rank, params in destinations.items()
        for param, shard in params.items()
        for rect in shard.zeros
    )
    last = max(destinations) + 1
    shapes = tuple({param: shard.shape for param, shard in destinations.get(r, {}).items()} for r in range(last))
    unread = tuple((rank, name) for rank, params in enumerate(sources) for name, s in params.items() if s.is_copy)
    _prove_destinations(ops, zeros, shapes)
    _prove_sources(ops, sources, holders, is_whole=is_whole)
    fp32 &= {param for params in shapes for param in params}
    return Plan(tuple(ops), zeros, shapes, fp32, unread, _digest(ops, zeros, shapes, fp32))


@dataclass(frozen=True, slots=True)
class _Holder:
    """A trainer shard that has a tile."""

    rank: int
    param: str
    rect: Rect


Holders = Mapping[str, Mapping[Rect, Sequence[_Holder]]]
"""{HF tensor: {trainer tile of it: the ranks that hold this tile, lowest first}}"""


def _holders(sources: Shards) -> Holders:
    holders: dict[str, dict[Rect, list[_Holder]]] = defaultdict(lambda: defaultdict(list))
    for rank, params in enumerate(sources):
        for name, shard in params.items():
            for tile in () if shard.is_copy else shard.tiles:
                holders[tile.hf_name][tile.hf_rect].append(_Holder(rank, name, tile.rect))
    return holders


def _ops_into(dst_rank: int, params: Mapping[str, ShardSpec], holders: Holders, num_sources: int) -> Iterator[Op]:
    """The ops that fill one engine rank."""
    load: Counter[int] = Counter()
    for dst_param, shard in params.items():
        for tile in shard.tiles:
            for held, replicas in holders.get(tile.hf_name, {}).items():
                common = held.intersect(tile.hf_rect)
                if common is None:
                    continue
                source = replicas[0]
                if len(replicas) > 1:
                    source = min(replicas, key=lambda one: (load[one.rank], (one.rank - dst_rank) % num_sources))
                load[source.rank] += common.area
                yield Op(
                    dst_rank,
                    dst_param,
                    common.shift(tile.rect.row0 - tile.hf_rect.row0, tile.rect.col0 - tile.hf_rect.col0),
                    source.rank,
                    source.param,
                    common.shift(source.rect.row0 - held.row0, source.rect.col0 - held.col0),
                    tile.hf_name,
                    common,
                )


def _prove_destinations(ops: Iterable[Op], zeros: Iterable[Zero], shapes: Sequence[Mapping[str, Shape]]) -> None:
    """Every element of every engine shard is written exactly once."""
    written: dict[tuple[int, str], list[Rect]] = defaultdict(list)
    writes: Iterable[Op | Zero] = chain(ops, zeros)
    for write in writes:
        written[write.dst_rank, write.dst_param].append(write.dst_rect)
    for rank, params in enumerate(shapes):
        for param, shape in params.items():
            problem = cover_problem(written.pop((rank, param), []), view_2d(shape))
            assert problem is None, f"engine rank {rank}, {param} {shape}: {problem}"
    assert not written, f"writes to parameters that the engine does not have: {sorted(written)[:3]}"


def _prove_sources(ops: Iterable[Op], sources: Shards, holders: Holders, *, is_whole: bool) -> None:
    """Reads lie inside trainer shards, in a tile of the tensor they name; every element the trainer holds is read."""
    tile_of: dict[tuple[int, str, str], list[Tile]] = defaultdict(list)
    for rank, params in enumerate(sources):
        for param, shard in params.items():
            for tile in shard.tiles:
                tile_of[rank, param, tile.hf_name].append(tile)
    read: dict[str, set[Rect]] = defaultdict(set)
    for op in ops:
        tiles = tile_of[op.src_rank, op.src_param, op.hf_name]
        whole = view_2d(sources[op.src_rank][op.src_param].shape)
        assert op.src_rect.within(whole), f"{op} reads outside of its source {whole}"
        assert any(_reads(op, tile) for tile in tiles), f"{op} reads what its source does not hold"
        read[op.hf_name].add(op.hf_rect)
    for name, tiles_of_name in holders.items() if is_whole else ():
        area = cover_area(tiles_of_name, f"trainer tiles of {name}")
        needed = cover_area(read[name], f"reads of {name}")
        assert needed == area, f"{name}: the trainer holds {area} elements, the engine takes {needed}"


def _reads(op: Op, tile: Tile) -> bool:
    """Whether ``op`` reads a part of ``tile`` and names it rightly."""
    rows, cols = tile.rect.row0 - tile.hf_rect.row0, tile.rect.col0 - tile.hf_rect.col0
    return op.hf_rect.within(tile.hf_rect) and op.hf_rect.shift(rows, cols) == op.src_rect


def cover_problem(rects: Sequence[Rect], whole: Rect) -> str | None:
    """Why ``rects`` do not cover ``whole`` exactly once, None when they do."""
    for rect in rects:
        if not rect.within(whole):
            return f"{rect} is empty or reaches out of {whole}"
    overlap = _overlap(rects)
    if overlap:
        return f"{overlap[0]} and {overlap[1]} overlap"
    area = sum(rect.area for rect in rects)
    return None if area == whole.area else f"{whole.area - area} of {whole.area} elements are never written"


def cover_area(rects: Iterable[Rect], what: str) -> int:
    """Number of elements of disjoint ``rects``; overlapping ones break an invariant."""
    rects = list(rects)
    overlap = _overlap(rects)
    assert overlap is None, f"{what}: {overlap} overlap"
    return sum(rect.area for rect in rects)


def _overlap(rects: Iterable[Rect]) -> tuple[Rect, Rect] | None:
    """Two rectangles with a common element, if any: a sweep over rows, comparing only those alive in the same row."""
    alive: list[Rect] = []
    for rect in sorted(rects):
        alive = [other for other in alive if other.row1 > rect.row0]
        for other in alive:
            if rect.intersect(other):
                return other, rect
        alive.append(rect)
    return None


def _digest(
    ops: Sequence[Op], zeros: Sequence[Zero], shapes: Sequence[Mapping[str, Shape]], fp32: frozenset[str]
) -> str:
    """sha256 over one line per op, zero fill and shape."""
    digest = hashlib.sha256(b"megarl weight plan 2\n")
    for op in ops:
        target = f"{op.dst_rank} {op.dst_param} {_text(op.dst_rect)}"
        source = f"{op.src_rank} {op.src_param} {_text(op.src_rect)}"
        digest.update(f"copy {target} {source} {op.hf_name} {_text(op.hf_rect)}\n".encode())
    for zero in zeros:
        digest.update(f"zero {zero.dst_rank} {zero.dst_param} {_text(zero.dst_rect)}\n".encode())
    for rank, params in enumerate(shapes):
        for param, shape in params.items():
            digest.update(f"shape {rank} {param} {shape} {'fp32' if param in fp32 else ''}\n".encode())
    return digest.hexdigest()


def _text(rect: Rect) -> str:
    return f"{rect.row0}:{rect.row1},{rect.col0}:{rect.col1}"
