"""Hugging Face model folders: check one by its headers, read a shard's own bytes out of it.

A safetensors file is an 8-byte little-endian length, a JSON header of that length giving every tensor's dtype, shape
and byte offsets, and the data. Checking a folder reads only the headers, so it takes milliseconds for any model and
needs no torch.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megarl.weights.mappings import Rect, Shape, ShardSpec
from megarl.weights.spec import ModelSpec

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_TYPES = ("F32", "BF16", "F16")

_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Constants that old transformers versions saved beside the weights."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says about one tensor."""

    file: Path
    dtype: str
    shape: Shape
    offset: int
    """First byte of its data in the file."""


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of the model in ``folder``, without reading its data.

    Raises:
        ValueError: no safetensors file, one missing that the index names, a damaged one, or a tensor in two files.
    """
    headers: dict[str, TensorHeader] = {}
    for path in _weight_files(Path(folder)):
        for name, header in file_headers(path):
            if name in headers:
                raise ValueError(f"{name} must be in one file: it is in {headers[name].file} and {path}; remove one")
            headers[name] = header
    return headers


def check_folder(folder: Path, spec: ModelSpec) -> None:
    """Check that the files in ``folder`` hold exactly the tensors of ``spec``.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape or not a float; or as ``read_headers``.
    """
    headers, expected = read_headers(folder), spec.hf_tensors()
    missing = [name for name in expected if name not in headers]
    if missing:
        raise ValueError(
            f"{folder} must hold every tensor of a {spec.family} model: {_some(missing)} missing; "
            "copy the folder again, or take the config.json that belongs to it"
        )
    extra = sorted(name for name in headers if name not in expected and not _may_be_extra(name, spec))
    if extra:
        raise ValueError(
            f"{folder} must hold only tensors of a {spec.family} model as in its config.json: {_some(extra)} unknown; "
            "take the config.json that belongs to it"
        )
    for name, shape in expected.items():
        header = headers[name]
        if header.shape != shape:
            raise ValueError(
                f"{name} in {header.file} must have the shape that config.json gives, {list(shape)}, not "
                f"{list(header.shape)}; take the config.json that belongs to the weights"
            )
        if header.dtype not in FLOAT_TYPES:
            raise ValueError(
                f"{name} in {header.file} must be one of {', '.join(FLOAT_TYPES)}, not {header.dtype}; "
                "dequantise the model first"
            )


class ShardReader:
    """Reads shards out of a model folder, keeping its files open. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._file_of = {name: header.file for name, header in read_headers(folder).items()}
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def read(self, shard: ShardSpec, dtype: torch.dtype) -> torch.Tensor:
        """The shard as a new CPU tensor, zero where no tile reaches. Touches only the bytes of its tiles.

        Raises:
            ValueError: the folder lacks a tensor.
        """
        import torch

        tensor = torch.zeros(shard.shape, dtype=dtype)
        view = tensor.view(-1, shard.shape[-1]) if len(shard.shape) > 1 else tensor.view(-1, 1)
        for tile in shard.tiles:
            at = tile.rect
            view[at.row0 : at.row1, at.col0 : at.col1] = self._read_rect(tile.hf_name, tile.hf_rect)
        return tensor

    def _read_rect(self, name: str, rect: Rect) -> torch.Tensor:
        """The rectangle as [rows, cols]."""
        from safetensors import safe_open

        if name not in self._file_of:
            raise ValueError(f"the model folder must hold {name}; check it with check_folder")
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        data = self._open[path].get_slice(name)
        if len(data.get_shape()) == 1:
            part: torch.Tensor = data[rect.row0 : rect.row1].unsqueeze(1)
        else:
            part = data[rect.row0 : rect.row1, rect.col0 : rect.col1]
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()


def _weight_files(folder: Path) -> list[Path]:
    """The files transformers would load: the single one, else those that the index names."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(
            f"{folder} must hold {SINGLE_FILE} or {INDEX_FILE}: it has neither; convert the model to safetensors"
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} must be a safetensors index with a weight_map ({error}); copy the folder again"
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder} must hold every file its index names: {_some(missing)} missing; copy the folder again"
        )
    return [folder / name for name in names]


def file_headers(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Every tensor of one file, after checking that the file is as long as its header says.

    Raises:
        ValueError: it is cut off, or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{path} must be a safetensors file: it is cut off or something else; copy it again")
        text = file.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        headers = {
            name: TensorHeader(path, e["dtype"], tuple(e["shape"]), 8 + length + int(e["data_offsets"][0]))
            for name, e in entries.items()
        }
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} must start with a safetensors header ({error!r}); copy it again") from error
    if 8 + length + end != size:
        raise ValueError(f"{path} must be {8 + length + end} bytes long by its header, not {size}; copy it again")
    yield from headers.items()


def _may_be_extra(name: str, spec: ModelSpec) -> bool:
    """Tensors that transformers ignores too.

    A tied head saved all the same, derived constants, and layers after the last, which predict further tokens
    (multi-token prediction) and are neither trained nor served.
    """
    if (spec.tied and name == "lm_head.weight") or _DERIVED.fullmatch(name):
        return True
    layer = _LAYER.match(name)
    return layer is not None and int(layer.group(1)) >= spec.layers and spec.sigmoid_router is not None


def _some(names: list[str]) -> str:
    """The first names and how many more, followed by is or are."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
