"""What a weight sync moves, before anything is started: sizes of plans, bytes, bounds, and who should sit where.

need        what an engine rank must end up with, less padding
bound       with trainer and engines on different GPUs: all of it, for every rank
colocated   with engine ranks on the trainer's GPUs: what is not already there, for the best assignment of ranks to
GPUs, which is the assignment problem of the bytes that each pair has in common (Kuhn 1955; scipy's
solver)
usual       what systems move that hand every engine rank the whole model
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

from megarl.weights.engine_layout import EngineLayout, engine_params
from megarl.weights.mappings import Rect
from megarl.weights.megatron_layout import MegatronLayout, megatron_params
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec

ITEM_BYTES = 2
"""bf16, in which weights travel."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, where it is trained and where it is served."""

    model: str
    spec: ModelSpec
    trainer: MegatronLayout
    engine: EngineLayout

    @property
    def text(self) -> str:
        """Example: ``TP4 PP2 EP8 -> TP8 EP8``."""
        sizes = [f"{key.upper()}{getattr(self.trainer, key)}" for key in ("tp", "pp", "ep", "etp")]
        shown = [size for size in sizes if not size.endswith("P1")] or ["one rank"]
        experts = f" EP{self.engine.tp}" if self.engine.expert_parallel else ""
        return f"{' '.join(shown)} -> TP{self.engine.tp}{experts}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of engine rank 0; the ranks of an engine differ by a few rows of vocabulary. Bytes are of bf16."""

    num_ops: int
    plan_s: float
    """Seconds that one rank takes to plan."""
    need_bytes: int
    model_bytes: int
    colocated_bytes: int
    """On average over the GPUs, with the best assignment."""
    straight_bytes: int
    """The same when GPU g simply gets rank g modulo TP."""
    assignment: tuple[int, ...]
    """The engine rank of every GPU."""


def traffic_of(setting: Setting) -> Traffic:
    """Plan one engine rank, and find the assignment that moves least.

    Raises:
        ValueError: a layout cannot hold the model.
    """
    spec, trainer, engine = setting.spec, setting.trainer, setting.engine
    start = time.perf_counter()
    plan = make_plan(spec, trainer, engine, "te", dst_rank=0)
    seconds = time.perf_counter() - start
    needs, common = _needs_and_common(spec, trainer, engine)
    assignment, kept = _assign(common)
    straight = [rank % engine.tp for rank in range(trainer.world_size)]
    size = trainer.world_size
    return Traffic(
        num_ops=len(plan.ops),
        plan_s=seconds,
        need_bytes=plan.num_bytes(0, ITEM_BYTES),
        model_bytes=spec.num_params * ITEM_BYTES,
        colocated_bytes=(int(sum(needs[rank] for rank in assignment)) - kept) * ITEM_BYTES // size,
        straight_bytes=int(sum(needs[rank] - common[gpu, rank] for gpu, rank in enumerate(straight)))
        * ITEM_BYTES
        // size,
        assignment=assignment,
    )


def _needs_and_common(spec: ModelSpec, trainer: MegatronLayout, engine: EngineLayout) -> tuple[np.ndarray, np.ndarray]:
    """(elements each engine rank needs, elements that trainer rank g and engine rank r have in common)."""
    needs = np.zeros(engine.tp, dtype=np.int64)
    common = np.zeros((trainer.world_size, engine.tp), dtype=np.int64)
    held = [_tiles_by_name(spec, trainer, rank) for rank in range(trainer.world_size)]
    for rank in range(engine.tp):
        for shard in engine_params(spec, engine, rank).values():
            for tile in shard.tiles:
                needs[rank] += tile.hf_rect.area
                for gpu, tiles in enumerate(held):
                    for other in tiles.get(tile.hf_name, ()):
                        part = other.intersect(tile.hf_rect)
                        common[gpu, rank] += part.area if part else 0
    return needs, common


def _tiles_by_name(spec: ModelSpec, trainer: MegatronLayout, rank: int) -> dict[str, list[Rect]]:
    found: dict[str, list[Rect]] = {}
    for shard in megatron_params(spec, trainer, rank, "te").values():
        for tile in () if shard.is_copy else shard.tiles:
            found.setdefault(tile.hf_name, []).append(tile.hf_rect)
    return found


def _assign(common: np.ndarray) -> tuple[tuple[int, ...], int]:
    """(engine rank of every GPU, elements that need not move), every rank on as many GPUs."""
    gpus, ranks = common.shape
    if gpus % ranks:
        raise ValueError(f"{gpus} trainer ranks must be a multiple of the engine's {ranks}: each rank sits on a GPU")
    rows, columns = linear_sum_assignment(np.tile(common, (1, gpus // ranks)), maximize=True)
    assignment = tuple(int(columns[np.flatnonzero(rows == gpu)[0]]) % ranks for gpu in range(gpus))
    return assignment, int(sum(common[gpu, rank] for gpu, rank in enumerate(assignment)))


def typical_settings(models: Path) -> Iterator[Setting]:
    """The shipped models over layouts in which they are trained and served."""
    layouts: dict[str, Sequence[tuple[dict[str, Any], EngineLayout]]] = {
        "Qwen3-8B": (({"tp": 2, "world_size": 8}, EngineLayout(2)), ({"tp": 4, "pp": 2}, EngineLayout(8))),
        "Qwen3-30B-A3B": (
            ({"tp": 4, "ep": 8, "world_size": 8}, EngineLayout(8, expert_parallel=True)),
            ({"tp": 4, "ep": 8, "world_size": 8}, EngineLayout(8)),
            ({"tp": 2, "pp": 2, "ep": 4, "world_size": 8}, EngineLayout(4, expert_parallel=True)),
        ),
        "Qwen3-235B-A22B": (({"tp": 4, "pp": 2, "ep": 8, "world_size": 16}, EngineLayout(8, expert_parallel=True)),),
        "Mixtral-8x7B": (({"tp": 2, "pp": 2, "ep": 4, "world_size": 8}, EngineLayout(8)),),
        "DeepSeek-V3": (
            ({"tp": 8, "pp": 4, "ep": 8, "world_size": 32, "first_stage_layers": 16}, EngineLayout(16, True)),
        ),
    }
    for model, pairs in layouts.items():
        spec = ModelSpec.from_folder(models / model)
        for sizes, engine in pairs:
            world = sizes.get("world_size", sizes.get("tp", 1) * sizes.get("pp", 1))
            yield Setting(model, spec, MegatronLayout(**{"world_size": world, **sizes}), engine)


def print_table(settings: Sequence[Setting]) -> None:
    """One row per setting; sizes in GiB per engine rank."""
    table = Table(caption="GiB per GPU in bf16; colocated: with the best assignment of engine ranks to trainer GPUs")
    for column in (
        "model",
        "trainer -> engine",
        "GPUs",
        "ops",
        "plan s",
        "need",
        "colocated",
        "GPU g: rank g",
        "usual",
    ):
        table.add_column(column, justify="left" if column in ("model", "trainer -> engine") else "right")
    found = [(setting, traffic_of(setting)) for setting in settings]
    for setting, one in found:
        sizes = (one.need_bytes, one.colocated_bytes, one.straight_bytes, one.model_bytes)
        table.add_row(
            setting.model,
            setting.text,
            str(setting.trainer.world_size),
            f"{one.num_ops:,}",
            f"{one.plan_s:.2f}",
            *(f"{size / GIB:.2f}" for size in sizes),
        )
    console = Console(width=120)
    console.print(table)
    for setting, one in found:
        if one.colocated_bytes < one.straight_bytes:
            ranks = " ".join(map(str, one.assignment))
            console.print(f"{setting.model}, {setting.text}: colocated, GPUs 0 to n should take engine ranks {ranks}")
