"""Export to Hugging Face safetensors: every trainer rank writes its own rectangles into files laid out beforehand.

All shapes are known from the model's spec, so the headers can be written before any weight moves. The driver makes the
files at their full size (``create_files``), each rank maps them and fills in what it owns (``owned_tiles``,
``write_tiles``), and the driver publishes the folder by one rename. No process ever holds more than its own shard.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.weights.mappings import Shape, Tile
from megarl.weights.megatron_layout import MegatronLayout, Names, megatron_params
from megarl.weights.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

MAX_FILE_BYTES = 5 * 10**9
ITEM_BYTES = {"F32": 4, "BF16": 2}
"""safetensors' names of the number formats that can be exported, and their sizes."""
KEPT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files of the original folder that belong to an export too."""


def exported_dtype(model: Path) -> str:
    """The number format that ``model``'s config.json names, in safetensors' words; F32 where it names none."""
    config = json.loads((model / "config.json").read_text())
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "BF16" if named == "bfloat16" else "F32"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies."""

    file: str
    offset: int
    """Bytes from the start of the file."""
    shape: Shape


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Every file of an export, before anything is written."""

    dtype: str
    places: dict[str, Place]
    headers: dict[str, bytes]
    sizes: dict[str, int]
    """Whole size of each file in bytes."""


def plan_files(tensors: Mapping[str, Shape], dtype: str, max_file_bytes: int = MAX_FILE_BYTES) -> FilePlan:
    """Distribute ``tensors`` over files of at most ``max_file_bytes`` (a larger tensor gets its own)."""
    groups = _groups(tensors, ITEM_BYTES[dtype], max_file_bytes)
    places: dict[str, Place] = {}
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for number, names in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        spans, end = {}, 0
        for tensor in names:
            start, end = end, end + math.prod(tensors[tensor]) * ITEM_BYTES[dtype]
            spans[tensor] = (start, end)
        headers[name] = _header({n: (tensors[n], span) for n, span in spans.items()}, dtype)
        sizes[name] = len(headers[name]) + end
        places |= {n: Place(name, len(headers[name]) + start, tensors[n]) for n, (start, _) in spans.items()}
    return FilePlan(dtype, places, headers, sizes)


def _groups(tensors: Mapping[str, Shape], item_bytes: int, max_file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors):
        size = math.prod(tensors[name]) * item_bytes
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _header(tensors: Mapping[str, tuple[Shape, tuple[int, int]]], dtype: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, (shape, span) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def create_files(folder: Path, plan: FilePlan) -> None:
    """Make every file at its full size, header written, data zero; and the index where there are several."""
    for name, size in plan.sizes.items():
        with (folder / name).open("wb") as file:
            file.write(plan.headers[name])
            file.truncate(size)
    if len(plan.sizes) > 1:
        total = sum(plan.sizes.values()) - sum(map(len, plan.headers.values()))
        weight_map = {tensor: place.file for tensor, place in sorted(plan.places.items())}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def owned_tiles(spec: ModelSpec, layout: MegatronLayout, rank: int, names: Names) -> Iterator[tuple[str, Tile]]:
    """(parameter, tile) of everything ``rank`` has to write: of equal replicas the lowest rank is the owner.

    Data-parallel ranks are replicas of each other, experts along their own axis; tensor-parallel ranks are replicas in
    what they hold whole, which is what they have in common with tensor-parallel rank 0 of their group.
    """
    dense, expert = layout.dense(rank), layout.expert(rank)
    of_tp_0 = set(_tiles(spec, layout, rank - dense.tp, names)) if dense.tp else set()
    for name, tile in _tiles(spec, layout, rank, names):
        is_replica = expert.edp if ".experts." in name else dense.dp or dense.cp or (name, tile) in of_tp_0
        if not is_replica:
            yield name, tile


def _tiles(spec: ModelSpec, layout: MegatronLayout, rank: int, names: Names) -> Iterator[tuple[str, Tile]]:
    for name, shard in megatron_params(spec, layout, rank, names).items():
        if not shard.is_copy:
            yield from ((name, tile) for tile in shard.tiles)


def write_tiles(folder: Path, plan: FilePlan, tiles: Iterator[tuple[str, Tile]], params: Mapping[str, Tensor]) -> int:
    """Fill in this rank's rectangles from its live shards; the number of bytes written."""
    import torch

    dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[plan.dtype]
    maps = {
        name: torch.from_file(str(folder / name), shared=True, size=size, dtype=torch.uint8)
        for name, size in plan.sizes.items()
    }
    written = 0
    for name, tile in tiles:
        place = plan.places[tile.hf_name]
        count = math.prod(place.shape)
        whole = maps[place.file][place.offset : place.offset + count * dtype.itemsize].view(dtype)
        target = whole.view(place.shape[0], -1)
        shard = params[name].detach()
        source = shard.reshape(shard.shape[0], -1)
        to, of = tile.hf_rect, tile.rect
        target[to.row0 : to.row1, to.col0 : to.col1] = source[of.row0 : of.row1, of.col0 : of.col1].to("cpu", dtype)
        written += to.area * dtype.itemsize
    return written
