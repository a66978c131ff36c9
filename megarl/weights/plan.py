"""Placeholder: see the plan records (Rect, Op, Plan)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rect:
    """Rows ``[row0, row1)`` and columns ``[col0, col1)`` of a 2-D view.

    A 1-D tensor of n elements is viewed as [n, 1]; a 3-D expert tensor [E, r, c] as [E * r, c].
    """

    row0: int
    row1: int
    col0: int
    col1: int


@dataclass(frozen=True, slots=True)
class Op:
    """Copy one rectangle of a trainer rank's shard into one rectangle of an engine rank's shard."""

    dst_rank: int
    dst_param: str
    dst_rect: Rect
    src_rank: int
    """Trainer world rank; among replicas the one with the least bytes so far."""
    src_param: str
    src_rect: Rect
    hf_name: str
    hf_rect: Rect


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one weight sync does, for every rank of one engine."""

    ops: tuple[Op, ...]
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    """[engine rank]{param: shape in vLLM's checkpoint layout, before any repacking}"""
    digest: str
    """sha256 of the canonical form; trainer and engines refuse to talk when theirs differ."""
