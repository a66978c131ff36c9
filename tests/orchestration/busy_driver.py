"""A driver with two busy workers, to be stopped from outside. Prints the pids of all it started, then waits.

Usage: busy_driver.py LOG_FOLDER SHARED_MEMORY_FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

from megarl.orchestration.ray_workers import RayCluster
from megarl.orchestration.signals import run_until_signal


async def main(log_folder: Path, segment: str) -> None:
    with RayCluster(object_store_bytes=100 * 2**20) as cluster:
        group = await cluster.workers(
            "busy", "tests.orchestration.targets:Probe", [(), ()], env=[{}, {}], log_folder=log_folder
        )
        children = await group.call("start_child", timeout_s=20)
        await group.call("map_shared_memory", segment, timeout_s=20)
        started = [process.pid for process in psutil.Process().children(recursive=True)]
        print(json.dumps({"started": started, "children": children}), flush=True)
        await group.call("spin", timeout_s=600)


if __name__ == "__main__":
    run_until_signal(main(Path(sys.argv[1]), sys.argv[2]))
