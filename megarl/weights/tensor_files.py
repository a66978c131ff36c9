"""Safetensors files laid out before anything is written, and rectangles copied between them byte for byte.

All shapes are known from a model's spec and a layout, so a header can be written before any weight moves; then many
processes fill in what they own. Bytes are only moved, so any number format comes through unchanged, and a copy holds
one block of rows at a time, however large the tensor is.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.weights.mappings import Rect, Shape

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""safetensors' names of number formats, and their sizes."""
MAX_FILE_BYTES = 5 * 10**9
_BLOCK_BYTES = 16 * 2**20


# --- layout of files: pure -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies."""

    file: str
    offset: int
    """Bytes from the start of the file."""
    shape: Shape
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the 2-D view."""
        return (self.shape[-1] if len(self.shape) > 1 else 1) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Every file, before anything is written."""

    places: dict[str, Place]
    headers: dict[str, bytes]
    sizes: dict[str, int]
    """Whole size of each file in bytes."""


def plan_files(
    tensors: Mapping[str, tuple[Shape, str]], *, stem: str = "model", max_file_bytes: int = MAX_FILE_BYTES
) -> FilePlan:
    """Distribute {name: (shape, dtype)} over files of at most ``max_file_bytes`` (a larger tensor gets its own)."""
    groups = _groups(tensors, max_file_bytes)
    places: dict[str, Place] = {}
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for number, names in enumerate(groups, start=1):
        file = f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else f"{stem}.safetensors"
        spans, end = {}, 0
        for name in names:
            spans[name] = (end, end + _num_bytes(tensors[name]))
            end = spans[name][1]
        headers[file] = _header({name: (*tensors[name], span) for name, span in spans.items()})
        sizes[file] = len(headers[file]) + end
        for name, (start, _) in spans.items():
            places[name] = Place(file, len(headers[file]) + start, *tensors[name])
    return FilePlan(places, headers, sizes)


def _num_bytes(tensor: tuple[Shape, str]) -> int:
    return math.prod(tensor[0]) * ITEM_BYTES[tensor[1]]


def _groups(tensors: Mapping[str, tuple[Shape, str]], max_file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors):
        size = _num_bytes(tensors[name])
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _header(tensors: Mapping[str, tuple[Shape, str, tuple[int, int]]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, (shape, dtype, span) in tensors.items():
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


# --- copying ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copy:
    """One rectangle of a tensor in one file that goes to another file; paths are whole."""

    source: Place
    source_rect: Rect
    target: Place
    target_rect: Rect

    @property
    def num_bytes(self) -> int:
        """What is moved."""
        return self.source_rect.area * ITEM_BYTES[self.source.dtype]


class Descriptors:
    """Open files by path."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], int] = {}

    def of(self, path: str, flags: int) -> int:
        """A descriptor of ``path``, opened when first asked for."""
        if (path, flags) not in self._open:
            self._open[path, flags] = os.open(path, flags)
        return self._open[path, flags]

    def close(self) -> None:
        """Flush what was written, and close everything."""
        for (_, flags), descriptor in self._open.items():
            if flags != os.O_RDONLY:
                os.fsync(descriptor)
            os.close(descriptor)
        self._open = {}


@contextmanager
def descriptors() -> Iterator[Descriptors]:
    """Open files for the time of many copies."""
    opened = Descriptors()
    try:
        yield opened
    finally:
        opened.close()


def carry_out(copy: Copy, files: Descriptors) -> None:
    """Move the bytes of one rectangle, reading and writing exactly these."""
    assert copy.source.dtype == copy.target.dtype, f"{copy.source} and {copy.target} have different number formats"
    source, target = files.of(copy.source.file, os.O_RDONLY), files.of(copy.target.file, os.O_RDWR)
    read_from, write_to = _start(copy.source, copy.source_rect), _start(copy.target, copy.target_rect)
    if _is_one_run(copy.source, copy.source_rect) and _is_one_run(copy.target, copy.target_rect):
        _move(source, target, read_from, copy.num_bytes, write_to)
        return
    rows, width = copy.source_rect.row1 - copy.source_rect.row0, _width(copy.source, copy.source_rect)
    for row in range(rows):
        start = read_from + row * copy.source.row_bytes
        _move(source, target, start, width, write_to + row * copy.target.row_bytes)


def read_rectangle(place: Place, rect: Rect, files: Descriptors) -> bytearray:
    """The bytes of a rectangle, row after row."""
    descriptor, start, width = files.of(place.file, os.O_RDONLY), _start(place, rect), _width(place, rect)
    rows = rect.row1 - rect.row0
    if _is_one_run(place, rect):
        return bytearray(_read(descriptor, width * rows, start))
    return bytearray(b"".join(_read(descriptor, width, start + row * place.row_bytes) for row in range(rows)))


def _start(place: Place, rect: Rect) -> int:
    return place.offset + rect.row0 * place.row_bytes + rect.col0 * ITEM_BYTES[place.dtype]


def _width(place: Place, rect: Rect) -> int:
    return (rect.col1 - rect.col0) * ITEM_BYTES[place.dtype]


def _is_one_run(place: Place, rect: Rect) -> bool:
    """Whether its bytes follow each other: it has whole rows, or only one."""
    return _width(place, rect) == place.row_bytes or rect.row1 - rect.row0 == 1


def _move(source: int, target: int, read_from: int, size: int, write_to: int) -> None:
    for done in range(0, size, _BLOCK_BYTES):
        block = _read(source, min(_BLOCK_BYTES, size - done), read_from + done)
        _write(target, block, write_to + done)


def _read(descriptor: int, size: int, offset: int) -> bytes:
    block = os.pread(descriptor, size, offset)
    if len(block) != size:
        raise OSError(f"a file ended {size - len(block)} bytes before its header says")
    return block


def _write(descriptor: int, block: bytes, offset: int) -> None:
    written = os.pwrite(descriptor, block, offset)
    assert written == len(block), f"{written} of {len(block)} bytes were written"
