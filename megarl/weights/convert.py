"""Conversions between a Hugging Face folder and Megatron shards, each rank moving its own bytes, resumable.

The driver lays out all files in a scratch folder beside the output, the ranks fill them in, and one rename publishes
the folder. What a rank has done stands in a journal in the scratch folder, one byte for every rectangle, written after
it. So the same command goes on where a killed one stopped; another source or another layout starts anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from megarl.weights.export import KEPT_FILES
from megarl.weights.folders import free_name
from megarl.weights.hf_files import read_headers
from megarl.weights.megatron_files import (
    MegatronFiles,
    check_source,
    export_copies,
    exported_files,
    import_copies,
    planned_file,
)
from megarl.weights.tensor_files import Copy, FilePlan, carry_out, create_files, descriptors

_JOB, _JOURNAL = "job.json", "journal"


class Job(Protocol):
    """One conversion; small, and sent to every process."""

    @property
    def scratch(self) -> Path:
        """Where the files grow."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks of the Megatron side."""
        ...

    def copies(self, rank: int) -> Iterator[Copy]:
        """What ``rank`` has to move, in a fixed order."""
        ...


@dataclass(frozen=True, slots=True)
class Import:
    """From a Hugging Face folder to Megatron shards."""

    source: Path
    target: MegatronFiles
    """In the scratch folder."""

    @property
    def scratch(self) -> Path:
        """Where the files grow."""
        return self.target.folder

    @property
    def num_ranks(self) -> int:
        """One file each."""
        return self.target.layout.world_size

    def copies(self, rank: int) -> Iterator[Copy]:
        """Everything that goes into the file of ``rank``."""
        return import_copies(self.target, rank, read_headers(self.source))


@dataclass(frozen=True, slots=True)
class Export:
    """From Megatron shards to a Hugging Face folder."""

    source: MegatronFiles
    scratch: Path
    plan: FilePlan

    @property
    def num_ranks(self) -> int:
        """Of which each writes what no lower one has."""
        return self.source.layout.world_size

    def copies(self, rank: int) -> Iterator[Copy]:
        """Everything that ``rank`` owns."""
        return export_copies(self.source, rank, self.plan, self.scratch)


@dataclass(frozen=True, slots=True)
class Converted:
    """What one rank did."""

    num_bytes: int
    resumed_bytes: int
    """Of these, found done by an earlier run."""
    peak_bytes: int
    """Largest resident memory of the process so far."""


class Converter:
    """Runs in a process of its own: converts one rank after the other."""

    def convert(self, job: Job, rank: int | None) -> Converted | None:
        """Move what ``rank`` has to move and was not moved yet; nothing for None."""
        if rank is None:
            return None
        num_bytes = resumed = 0
        with (job.scratch / _JOURNAL / f"rank-{rank:05d}").open("ab") as journal, descriptors() as files:
            done = os.fstat(journal.fileno()).st_size
            for number, copy in enumerate(job.copies(rank)):
                num_bytes += copy.num_bytes
                if number < done:
                    resumed += copy.num_bytes
                    continue
                carry_out(copy, files)
                os.write(journal.fileno(), b".")
        return Converted(num_bytes, resumed, _peak_bytes())


def _peak_bytes() -> int:
    """Largest resident memory of this process; what getrusage says begins with that of the process it was forked by."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


# --- the driver's part -----------------------------------------------------------------------------------------------


def prepare_import(source: Path, output: MegatronFiles) -> Import:
    """Check everything and lay out the files, or find those of a run that was cut off.

    Raises:
        ValueError: the folder does not hold the model, or ``output`` exists.
    """
    check_source(source, output.spec)
    scratch = _scratch_of(output.folder)
    job = Import(source.absolute(), replace(output, folder=scratch))
    if _begin(scratch, source, {"layout": asdict(output.layout), "names": output.names}):
        headers = read_headers(source)
        for rank in range(output.layout.world_size):
            create_files(scratch, planned_file(job.target, rank, headers))
        _mark_laid_out(scratch)
    return job


def prepare_export(source: MegatronFiles, output: Path) -> Export:
    """The same from shards to a Hugging Face folder.

    Raises:
        ValueError: the shards are not whole, or ``output`` exists.
    """
    source.check()
    scratch, plan = _scratch_of(output), exported_files(source)
    if _begin(scratch, source.folder, {}):
        create_files(scratch, plan)
        _mark_laid_out(scratch)
    return Export(replace(source, folder=source.folder.absolute()), scratch, plan)


def finish(job: Import | Export, output: Path) -> None:
    """Add what is not weights, and let the folder appear."""
    source = job.source if isinstance(job, Import) else job.source.folder
    for name in ("config.json", *KEPT_FILES):
        if (source / name).is_file():
            shutil.copy(source / name, job.scratch / name)
    if isinstance(job, Import):
        job.target.write_manifest()
    shutil.rmtree(job.scratch / _JOURNAL)
    (job.scratch / _JOB).unlink()
    job.scratch.rename(output)


def _scratch_of(output: Path) -> Path:
    if output.exists():
        raise ValueError(f"{output} must not exist yet: nothing is overwritten; use {free_name(output)}, or remove it")
    return output.absolute().parent / f".{output.name}.partial"


def _begin(scratch: Path, source: Path, what: dict[str, object]) -> bool:
    """Whether files have to be laid out: there is no scratch folder of exactly this job."""
    files = sorted(path for path in source.iterdir() if path.is_file())
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps({"source": str(source.absolute()), "files": state, **what})
    job = scratch / _JOB
    if job.is_file() and job.read_text() == text and (scratch / _JOURNAL).is_dir():
        return False
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    job.write_text(text)
    return True


def _mark_laid_out(scratch: Path) -> None:
    """A run killed before this lays out anew."""
    (scratch / _JOURNAL).mkdir()
