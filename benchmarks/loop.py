"""Speed and memory of a whole training run, measured from outside: ``python benchmarks/loop.py --json FILE``.

Runs ``megarl train`` in a fresh folder, watches its processes and reads the metrics that the run writes. Every key of
the JSON object and its unit is listed in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_POLL_S = 0.5
_PHASES = ("generate", "score", "train", "sync", "evaluate", "save", "overhead")


@dataclass
class Watch:
    """What was seen of the running processes."""

    first_step_s: float | None = None
    peak_memory_bytes: int = 0
    processes_at_peak: int = 0
    seen: list[int] = field(default_factory=list)


def main() -> int:
    """Run, watch, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--config", type=Path, default=Path("configs/moe_grpo_cpu.yaml"))
    parser.add_argument("overrides", nargs="*", help="key=value, as for megarl train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder:
        command = [
            *(sys.executable, "-m", "megarl.cli", "train", str(options.config)),
            *(f"output={folder}", "name=bench", *options.overrides),
        ]
        start = time.perf_counter()
        metrics = Path(folder) / "bench" / "metrics.jsonl"
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        watch = _watch(process, metrics, start)
        total_s = time.perf_counter() - start
        if process.returncode:
            print(f"the run ended with status {process.returncode}", file=sys.stderr)
            return 1
        result = _result(metrics, watch, total_s)
    scratch = options.json.with_suffix(".tmp")
    scratch.write_text(json.dumps(result, indent=2) + "\n")
    scratch.rename(options.json)
    print(json.dumps(result, indent=2))
    return 0


def _watch(process: subprocess.Popen[bytes], metrics: Path, start: float) -> Watch:
    watch = Watch()
    while process.poll() is None:
        if watch.first_step_s is None and any(row["step"] >= 1 and "time/step_s" in row for row in _rows(metrics)):
            watch.first_step_s = time.perf_counter() - start
        memory, count = _memory(process.pid)
        if memory > watch.peak_memory_bytes:
            watch.peak_memory_bytes, watch.processes_at_peak = memory, count
        time.sleep(_POLL_S)
    return watch


def _memory(pid: int) -> tuple[int, int]:
    """(bytes, processes) of ``pid`` and all below it; a page that several share counts once (PSS)."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    total = 0
    for member in family:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total, len(family)


def _rows(metrics: Path) -> list[dict[str, float]]:
    if not metrics.is_file():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]


def _result(metrics: Path, watch: Watch, total_s: float) -> dict[str, float | int | None]:
    rows = [row for row in _rows(metrics) if "time/step_s" in row]
    steady = rows[1:] or rows  # the first step warms up
    step_s = sum(row["time/step_s"] for row in steady)
    shares = {f"{phase}_share": sum(row.get(f"time/{phase}_s", 0.0) for row in steady) / step_s for phase in _PHASES}
    return {
        "steps": len(rows),
        "first_step_s": watch.first_step_s,
        "total_s": total_s,
        "median_step_s": statistics.median(row["time/step_s"] for row in steady),
        "peak_memory_bytes": watch.peak_memory_bytes,
        "processes_at_peak": watch.processes_at_peak,
        **shares,
    }


if __name__ == "__main__":
    sys.exit(main())
