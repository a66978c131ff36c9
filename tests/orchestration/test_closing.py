"""A cluster's end when Ray notices what happens to its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CLOSING_SLOWLY = """
import asyncio, sys, time
from pathlib import Path
import psutil
from megarl.orchestration.ray_workers import RayCluster

kill = psutil.Process.kill

def kill_and_wait(process):
    kill(process)
    time.sleep(0.2)

psutil.Process.kill = kill_and_wait
with RayCluster(object_store_bytes=100 * 2**20) as cluster:
    asyncio.run(
        cluster.workers("probe", "tests.orchestration.targets:Probe", [()], env=[{}], log_folder=Path(sys.argv[1]))
    )
print("closed")
"""


@pytest.mark.slow
def test_a_cluster_closes_without_a_word_though_ray_sees_its_processes_die(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSING_SLOWLY, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
