"""Export of a live trainer to Hugging Face safetensors: every rank writes its own rectangles into planned files.

The driver makes the files at their full size (``create_files``), each rank maps them and fills in what it owns
(``owned_tiles``, ``write_tiles``), and the driver publishes the folder by one rename. No process ever holds more than
its own shard.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.weights.hf_files import read_headers
from megarl.weights.mappings import Tile
from megarl.weights.megatron_layout import MegatronLayout, Names, megatron_params
from megarl.weights.spec import ModelSpec
from megarl.weights.tensor_files import FilePlan

if TYPE_CHECKING:
    from torch import Tensor

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


def exported_dtypes(model: Path, spec: ModelSpec) -> dict[str, str]:
    """The number format of every tensor, in safetensors' words: what ``model``'s config.json names, F32 where none.

    In a bf16 model the tensors that are fp32 in its own files stay so, such as the experts' bias of DeepSeek and GLM.
    """
    config = json.loads((model / "config.json").read_text())
    if str(config.get("dtype") or config.get("torch_dtype")) != "bfloat16":
        return dict.fromkeys(spec.hf_tensors(), "F32")
    try:
        in_fp32 = {name for name, header in read_headers(model).items() if header.dtype == "F32"}
    except ValueError:  # it has no weights, or they are Megatron shards
        in_fp32 = set()
    return {name: "F32" if name in in_fp32 else "BF16" for name in spec.hf_tensors()}


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

    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    maps = {
        name: torch.from_file(str(folder / name), shared=True, size=size, dtype=torch.uint8)
        for name, size in plan.sizes.items()
    }
    written = 0
    for name, tile in tiles:
        place = plan.places[tile.hf_name]
        dtype = dtypes[place.dtype]
        whole = maps[place.file][place.offset : place.offset + math.prod(place.shape) * dtype.itemsize].view(dtype)
        target = whole.view(place.shape[0], -1)
        shard = params[name].detach()
        source = shard.reshape(shard.shape[0], -1)
        to, of = tile.hf_rect, tile.rect
        target[to.row0 : to.row1, to.col0 : to.col1] = source[of.row0 : of.row1, of.col0 : of.col1].to("cpu", dtype)
        written += to.area * dtype.itemsize
    return written
