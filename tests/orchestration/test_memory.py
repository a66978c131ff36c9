"""Freed memory goes back to the system, or stays for the next time, as a process's environment says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megarl.orchestration.memory import return_memory, reuse_memory

KEPT = """
import numpy, threading
from pathlib import Path

def resident():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) // 1024

def use():
    numpy.ones(8 * 2**20)  # 64 MiB

before = resident()
thread = threading.Thread(target=use)
thread.start()
thread.join()
print(resident() - before)
"""


@pytest.mark.parametrize(("environment", "is_kept"), [(return_memory(), False), (reuse_memory(), True)])
def test_what_a_process_keeps(environment: dict[str, str], is_kept: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEPT], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) > 56) == is_kept
