"""How a parameter and the Hugging Face tensors it is made of correspond: the one vocabulary of both layouts.

Everything meets in Hugging Face (HF) coordinates. A shard is described by tiles, each of which says "this rectangle of
the shard is that rectangle of an HF tensor". Tiles neither transform nor overlap, so the same record reads both ways:
HF to shard (import, and what an engine rank needs), shard to HF (export, and what a trainer rank can give). A weight
sync is the intersection of the trainer's tiles with the engine's.

All tensors are viewed in two dimensions: [n] as [n, 1], a stack of experts [E, r, c] as [E * r, c].

A family (``families/``) lists one ``ParamMap`` per parameter: its name in Megatron, its name in vLLM, and the op that
says which HF tensors it is made of and how tensor parallelism cuts them:

    Whole      every rank holds all of it (norms, the router, projections down to a low rank)
    Vocab      rows cut evenly after padding with zero rows (embedding, output head)
    Rows       rows cut evenly (projections up from a low rank to all heads)
    Columns    columns cut evenly (projections back to the hidden size)
    GateUp     gate and up cut by rows, each rank's gate part above its up part
    QKV        Megatron: grouped by query group [q of the group; k; v], then cut by rows; vLLM: q above k above v

Parameters with the same name in vLLM stand one below the other in it, in the order of their lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]
Sizes = Mapping[str, int]
"""The named dimensions of a model, as ``ModelSpec.sizes`` gives them."""


@dataclass(frozen=True, slots=True, order=True)
class Rect:
    """Rows ``[row0, row1)`` and columns ``[col0, col1)`` of a 2-D view.

    Example: ``Rect(0, 64, 0, 128)`` is the whole of a [64, 128] tensor.
    """

    row0: int
    row1: int
    col0: int
    col1: int

    @property
    def area(self) -> int:
        """Number of elements."""
        return (self.row1 - self.row0) * (self.col1 - self.col0)

    def within(self, outer: Rect) -> bool:
        """Whether this is a non-empty part of ``outer``."""
        rows = outer.row0 <= self.row0 < self.row1 <= outer.row1
        return rows and outer.col0 <= self.col0 < self.col1 <= outer.col1

    def intersect(self, other: Rect) -> Rect | None:
        """What both have in common, None when nothing."""
        row0, row1 = max(self.row0, other.row0), min(self.row1, other.row1)
        col0, col1 = max(self.col0, other.col0), min(self.col1, other.col1)
        return Rect(row0, row1, col0, col1) if row0 < row1 and col0 < col1 else None

    def shift(self, rows: int, cols: int) -> Rect:
        """The same rectangle further down and right."""
        return Rect(self.row0 + rows, self.row1 + rows, self.col0 + cols, self.col1 + cols)


def view_2d(shape: Shape) -> Rect:
    """The whole of a 1-, 2- or 3-D tensor in its 2-D view."""
    match shape:
        case (n,):
            return Rect(0, n, 0, 1)
        case (rows, cols):
            return Rect(0, rows, 0, cols)
        case (stack, rows, cols):
            return Rect(0, stack * rows, 0, cols)
    raise AssertionError(f"no 2-D view of {shape}")


@dataclass(frozen=True, slots=True)
class Tile:
    """``rect`` of a shard is ``hf_rect`` of the HF tensor ``hf_name``; both have the same size."""

    rect: Rect
    hf_name: str
    hf_rect: Rect


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One parameter of one rank. ``tiles`` and ``zeros`` together cover it exactly once."""

    shape: Shape
    tiles: tuple[Tile, ...]
    zeros: tuple[Rect, ...] = ()
    """Padding rows of the vocabulary: zero in an import and in an engine, never read by a sync."""
    is_copy: bool = False
    """True for a copy that Megatron keeps equal to another rank's parameter: imports fill it, a sync never reads it."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An HF tensor: its name below its layer (or its full name) and the names of its dimensions.

    Example: ``Tensor("self_attn.k_proj.weight", "kv", "hidden")``
    """

    name: str
    rows: str
    cols: str | None = None

    def shape(self, sizes: Sizes) -> Shape:
        """The shape in the file."""
        return (sizes[self.rows],) if self.cols is None else (sizes[self.rows], sizes[self.cols])


class Op(ABC):
    """Which HF tensors a parameter is made of, and how tensor parallelism cuts them."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The HF tensors this is made of."""

    @abstractmethod
    def shard(self, sizes: Sizes, ways: int, rank: int) -> ShardSpec:
        """Megatron's shard of tensor-parallel ``rank`` of ``ways``."""

    def engine_shard(self, sizes: Sizes, ways: int, rank: int) -> ShardSpec:
        """The engine's shard of tensor-parallel ``rank`` of ``ways``; Megatron's unless an op says otherwise."""
        return self.shard(sizes, ways, rank)


@dataclass(frozen=True)
class _OneTensor(Op):
    tensor: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)


class Whole(_OneTensor):
    """Every rank holds the whole tensor."""

    def shard(self, sizes: Sizes, ways: int, rank: int) -> ShardSpec:  # noqa: D102
        shape = self.tensor.shape(sizes)
        rect = view_2d(shape)
        return ShardSpec(shape, (Tile(rect, self.tensor.name, rect),))


class Vocab(_OneTensor):
    """Rows padded with zeros from ``vocab`` to ``padded_vocab``, then cut evenly."""

    def shard(self, sizes: Sizes, ways: int, rank: int) -> ShardSpec:  # noqa: D102
        vocab, cols = self.tensor.shape(sizes)
        rows = exact_share(sizes["padded_vocab"], ways)
        start = rank * rows
        real = max(0, min(vocab - start, rows))
        tiles = (Tile(Rect(0, real, 0, cols), self.tensor.name, Rect(start, start + real, 0, cols)),) if real else ()
        zeros = (Rect(real, rows, 0, cols),) if real < rows else ()
        return ShardSpec((rows, cols), tiles, zeros)


class Rows(_OneTensor):
    """Rows cut evenly."""

    def shard(self, sizes: Sizes, ways: int, rank: int) -> ShardSpec:  # noqa: D102
        all_rows, cols = self.tensor.shape(sizes)
        rows = exact_share(all_rows, ways)
        rect = Rect(0, rows, 0, cols)
        return ShardSpec((rows, cols), (Tile(rect, self.tensor.name, rect.shift(rank * rows, 0)),))


class Columns(_OneTensor):
    """Columns cut evenly."""

    def shard(self, sizes: Sizes, ways: int, rank: int) -> ShardSpec:  # noqa: D102
        rows, all_cols = self.tensor.shape(sizes)
        cols = exact_share(all_cols, ways)
        rect = Rect(0, rows, 0, cols)
        return ShardSpec((rows, cols), (Tile(rect, self.tensor.name, rect.shift(0, rank * cols)),))


@dataclass(frozen=True)
class GateUp(Op):
    """Gate and up of a SwiGLU MLP, each cut by rows; a rank's gate part lies above its up part."""

    gate: Tensor
    up: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.gate, self.up)

    def shard(self, sizes: Sizes, ways: int, rank: int) -> ShardSpec:  # noqa: D102
        all_rows, cols = self.gate.shape(sizes)
        rows = exact_share(all_rows, ways)
        part, source = Rect(0, rows, 0, cols), Rect(rank * rows, (rank + 1) * rows, 0, cols)
        tiles = (Tile(part, self.gate.name, source), Tile(part.shift(rows, 0), self.up.name, source))
        return ShardSpec((2 * rows, cols), tiles)


@dataclass(frozen=True)
class QKV(Op):
    """Query, key and value projections (weights or biases) of grouped-query attention.

    Megatron interleaves them by query group: with n query heads per group and head size D the whole is, group after
    group, [n * D rows of q; D of k; D of v]. The even cut may fall inside a group when there are more ranks than
    groups. In vLLM a rank's query heads lie above its key heads, these above its value heads; ranks that outnumber the
    key-value heads share them.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # noqa: D102
        return (self.q, self.k, self.v)

    def shard(self, sizes: Sizes, ways: int, rank: int) -> ShardSpec:  # noqa: D102
        shape = self.q.shape(sizes)
        rows, cols = exact_share(sizes["q"] + 2 * sizes["kv"], ways), view_2d(shape).col1
        window = Rect(rank * rows, (rank + 1) * rows, 0, cols)
        tiles = []
        for whole_rect, name, hf_row in self._groups(sizes, cols):
            part = whole_rect.intersect(window)
            if part:
                hf_rect = part.shift(hf_row - whole_rect.row0, 0)
                tiles.append(Tile(part.shift(-window.row0, 0), name, hf_rect))
        return ShardSpec((rows, *shape[1:]), tuple(tiles))

    def _groups(self, sizes: Sizes, cols: int) -> Iterator[tuple[Rect, str, int]]:
        """(rows of the uncut parameter, HF tensor, its first row) of every block, top to bottom."""
        groups, head = sizes["kv_heads"], sizes["head_dim"]
        query_rows = sizes["q"] // groups
        top = 0
        for group in range(groups):
            for tensor, rows in ((self.q, query_rows), (self.k, head), (self.v, head)):
                yield Rect(top, top + rows, 0, cols), tensor.name, group * rows
                top += rows

    def engine_shard(self, sizes: Sizes, ways: int, rank: int) -> ShardSpec:  # noqa: D102
        shape = self.q.shape(sizes)
        cols = view_2d(shape).col1
        query_rows = exact_share(sizes["q"], ways)
        kv_ways = min(ways, sizes["kv_heads"])
        kv_rows = exact_share(sizes["kv"], kv_ways)
        kv_part = rank // exact_share(ways, kv_ways)
        tiles, top = [], 0
        for tensor, rows, part in ((self.q, query_rows, rank), (self.k, kv_rows, kv_part), (self.v, kv_rows, kv_part)):
            source = Rect(part * rows, (part + 1) * rows, 0, cols)
            tiles.append(Tile(source.shift(top - source.row0, 0), tensor.name, source))
            top += rows
        return ShardSpec((top, *shape[1:]), tuple(tiles))


@dataclass(frozen=True, slots=True)
class ParamMap:
    """One parameter in its three worlds.

    Names inside a layer are below the layer's prefix. ``{expert}`` stands for the expert's number: global in HF names,
    local in Megatron's; vLLM stacks all experts of a rank into one parameter.
    """

    megatron: str
    """As in Megatron-Core's local layer spec; ``megatron_layout.py`` turns it into Transformer Engine's."""
    engine: str
    op: Op
    per_expert: bool = False
    when: str = ""
    """The attribute of ``ModelSpec`` that says whether a model has this parameter; empty: every model of the family."""
    fp32_in_engine: bool = False
    """vLLM keeps it in fp32 whatever the model's number format."""
    is_buffer: bool = False
    """A persistent buffer in Megatron, kept in fp32 there, and no parameter."""


def exact_share(size: int, ways: int) -> int:
    """``size`` / ``ways``, which the layout has checked to divide."""
    assert size % ways == 0, f"{size} rows or columns cannot be cut into {ways} equal parts"
    return size // ways


def relocated(shard: ShardSpec, prefix: str, expert: int | None = None) -> ShardSpec:
    """``shard`` with its HF names put below ``prefix`` and ``{expert}`` filled in."""
    number = "" if expert is None else str(expert)
    tiles = tuple(Tile(t.rect, prefix + t.hf_name.replace("{expert}", number), t.hf_rect) for t in shard.tiles)
    return ShardSpec(shard.shape, tiles, shard.zeros, shard.is_copy)


def stacked_rows(above: ShardSpec, below: ShardSpec) -> ShardSpec:
    """One shard of the rows of both, which have the same columns."""
    top = above.shape[0]
    tiles = tuple(Tile(t.rect.shift(top, 0), t.hf_name, t.hf_rect) for t in below.tiles)
    zeros = tuple(rect.shift(top, 0) for rect in below.zeros)
    return ShardSpec((top + below.shape[0], *above.shape[1:]), above.tiles + tiles, above.zeros + zeros)
