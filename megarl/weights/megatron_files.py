"""A model as Megatron shards on disk: what ``megarl import`` writes, ``megarl export`` and a trainer read.

    config.json, tokenizer files      of the Hugging Face folder it came from
    megatron.json                     the layout, and which layer spec the names are of
    rank-00003-of-00008.safetensors   one file a rank: its parameters and buffers by Megatron's own names

The number format of every tensor is that of the files it came from, so the way back is bit for bit. A trainer of any
layout can start from it too: whatever a rank needs is found by Hugging Face coordinates (``mappings.py``).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megarl.weights.export import owned_tiles
from megarl.weights.hf_files import ShardReader, TensorHeader, check_folder, file_headers, read_headers
from megarl.weights.mappings import Rect, ShardSpec
from megarl.weights.megatron_layout import MegatronLayout, Names, megatron_params
from megarl.weights.spec import ModelSpec
from megarl.weights.tensor_files import Copy, Descriptors, FilePlan, Place, plan_files, read_rectangle

if TYPE_CHECKING:
    import torch

MANIFEST = "megatron.json"


@dataclass(frozen=True, slots=True)
class MegatronFiles:
    """A folder of Megatron shards.

    Example: ``MegatronFiles(Path("models/qwen3-tp2"), spec, MegatronLayout(tp=2, world_size=2), "local")``
    """

    folder: Path
    spec: ModelSpec
    layout: MegatronLayout
    names: Names

    @classmethod
    def open(cls, folder: Path) -> MegatronFiles:
        """Read the manifest.

        Raises:
            ValueError: there is none, it is damaged, or the layout cannot hold the model.
        """
        path = folder / MANIFEST
        try:
            manifest = json.loads(path.read_text())
            layout, names = MegatronLayout(**manifest["layout"]), manifest["names"]
        except FileNotFoundError:
            raise ValueError(f"{folder} must hold Megatron shards: it has no {MANIFEST}; check the path") from None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} must be a manifest of Megatron shards ({error!r}); import it again") from error
        if names not in ("local", "te"):
            raise ValueError(f"names ({names}) in {path} must be local or te; import it again")
        spec = ModelSpec.from_folder(folder)
        layout.check(spec)
        return cls(folder, spec, layout, names)

    def write_manifest(self) -> None:
        """The last file of a checkpoint."""
        text = json.dumps({"layout": asdict(self.layout), "names": self.names}, indent=2)
        (self.folder / MANIFEST).write_text(text + "\n")

    def file(self, rank: int) -> Path:
        """The file of ``rank``."""
        return self.folder / f"rank-{rank:05d}-of-{self.layout.world_size:05d}.safetensors"

    def params(self, rank: int) -> dict[str, ShardSpec]:
        """What ``rank`` holds."""
        return megatron_params(self.spec, self.layout, rank, self.names)

    def check(self) -> None:
        """Check that every rank's file holds exactly what the layout says.

        Raises:
            ValueError: a file is missing or damaged, or a tensor in it is missing, unknown or of another shape.
        """
        for rank in range(self.layout.world_size):
            if not self.file(rank).is_file():
                raise ValueError(f"{self.folder} must hold {self.file(rank).name}: it is missing; import it again")
            headers, params = dict(file_headers(self.file(rank))), self.params(rank)
            differing = sorted(headers.keys() ^ params.keys()) or [
                name for name in params if headers[name].shape != params[name].shape
            ]
            if differing:
                raise ValueError(
                    f"{self.file(rank)} must hold exactly the shards of its layout: {differing[0]} is not as it should "
                    "be; import it again"
                )

    def places(self, rank: int) -> dict[str, Place]:
        """Where every tensor of ``rank`` lies."""
        headers = dict(file_headers(self.file(rank)))
        return {name: _place(header) for name, header in headers.items()}


def _place(header: TensorHeader) -> Place:
    return Place(str(header.file), header.offset, header.shape, header.dtype)


# --- from Hugging Face -----------------------------------------------------------------------------------------------


def check_source(folder: Path, spec: ModelSpec) -> None:
    """Check a Hugging Face folder before it is imported.

    Raises:
        ValueError: as ``check_folder``, or parts of one Megatron parameter have different number formats.
    """
    check_folder(folder, spec)
    dtypes = {name: header.dtype for name, header in read_headers(folder).items()}
    for name, shard in megatron_params(spec, MegatronLayout(), 0).items():
        _dtype_of(name, shard, dtypes)


def _dtype_of(name: str, shard: ShardSpec, dtypes: Mapping[str, str]) -> str:
    found = {tile.hf_name: dtypes[tile.hf_name] for tile in shard.tiles}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{', '.join(sorted(found))} must have one number format, as they are one parameter of Megatron ({name}), "
            f"not {', '.join(sorted(set(found.values())))}; save the model in one format"
        )
    return next(iter(found.values()), "F32")


def planned_file(target: MegatronFiles, rank: int, headers: Mapping[str, TensorHeader]) -> FilePlan:
    """The file of ``rank``, before anything is written; ``headers`` are of the Hugging Face folder."""
    dtypes = {name: header.dtype for name, header in headers.items()}
    tensors = {name: (s.shape, _dtype_of(name, s, dtypes)) for name, s in target.params(rank).items()}
    return plan_files(tensors, stem=target.file(rank).stem, max_file_bytes=2**63)


def import_copies(target: MegatronFiles, rank: int, headers: Mapping[str, TensorHeader]) -> Iterator[Copy]:
    """Everything that has to be copied into the file of ``rank``, in a fixed order."""
    plan = planned_file(target, rank, headers)
    for name, shard in target.params(rank).items():
        to = replace(plan.places[name], file=str(target.folder / plan.places[name].file))
        for tile in shard.tiles:
            yield Copy(_place(headers[tile.hf_name]), tile.hf_rect, to, tile.rect)


# --- to Hugging Face -------------------------------------------------------------------------------------------------


def exported_files(source: MegatronFiles) -> FilePlan:
    """The Hugging Face files, in the number formats of the shards; from the files' headers alone."""
    dtypes: dict[str, str] = {}
    for rank in range(source.layout.world_size):
        places = source.places(rank)
        for name, shard in source.params(rank).items():
            dtypes.update((tile.hf_name, places[name].dtype) for tile in shard.tiles)
    return plan_files({name: (shape, dtypes[name]) for name, shape in source.spec.hf_tensors().items()})


def export_copies(source: MegatronFiles, rank: int, plan: FilePlan, folder: Path) -> Iterator[Copy]:
    """Everything that ``rank`` has to copy into the files of ``plan`` below ``folder``, in a fixed order."""
    places = source.places(rank)
    for name, tile in owned_tiles(source.spec, source.layout, rank, source.names):
        place = plan.places[tile.hf_name]
        yield Copy(places[name], tile.rect, replace(place, file=str(folder / place.file)), tile.hf_rect)


# --- to a trainer of any layout --------------------------------------------------------------------------------------


class MegatronReader:
    """Reads shards of any layout out of a folder of Megatron shards; the counterpart of ``ShardReader``."""

    def __init__(self, source: MegatronFiles) -> None:
        self._parts: dict[str, list[tuple[Rect, Place, Rect]]] = defaultdict(list)
        for rank in range(source.layout.world_size):
            places = source.places(rank)
            for name, tile in owned_tiles(source.spec, source.layout, rank, source.names):
                self._parts[tile.hf_name].append((tile.hf_rect, places[name], tile.rect))
        self._files = Descriptors()

    def read(self, shard: ShardSpec, dtype: torch.dtype) -> torch.Tensor:
        """The shard as a new CPU tensor, zero where no tile reaches. Touches only the bytes of its tiles."""
        import torch

        tensor = torch.zeros(shard.shape, dtype=dtype)
        view = tensor.view(-1, shard.shape[-1]) if len(shard.shape) > 1 else tensor.view(-1, 1)
        for tile in shard.tiles:
            for held, place, rect in self._parts[tile.hf_name]:
                common = held.intersect(tile.hf_rect)
                if common is None:
                    continue
                part = common.shift(rect.row0 - held.row0, rect.col0 - held.col0)
                values = torch.frombuffer(read_rectangle(place, part, self._files), dtype=_torch_dtype(place.dtype))
                to = common.shift(tile.rect.row0 - tile.hf_rect.row0, tile.rect.col0 - tile.hf_rect.col0)
                view[to.row0 : to.row1, to.col0 : to.col1] = values.view(to.row1 - to.row0, to.col1 - to.col0)
        return tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[name]


def open_reader(folder: Path) -> ShardReader | MegatronReader:
    """A reader of ``folder``, a Hugging Face one or one of Megatron shards. Use it as a context manager."""
    if (folder / MANIFEST).is_file():
        return MegatronReader(MegatronFiles.open(folder))
    return ShardReader(folder)


def check_model(folder: Path, spec: ModelSpec) -> None:
    """Check whichever kind of folder it is.

    Raises:
        ValueError: something in it is not as ``spec`` says.
    """
    if (folder / MANIFEST).is_file():
        MegatronFiles.open(folder).check()
    else:
        check_folder(folder, spec)
