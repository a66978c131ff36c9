"""Classes that the process tests run in workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

SEEN_AT_IMPORT = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_PORT")}


class Probe:
    """Answers what it sees, and breaks in the ways that workers break."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.calls: list[int] = []

    def rank(self) -> int:
        return int(os.environ["RANK"])

    def pid(self) -> int:
        return os.getpid()

    def add(self, value: int) -> int:
        return self.offset + value

    def double(self, array: np.ndarray) -> np.ndarray:
        return array * 2

    def remember(self, value: int) -> list[int]:
        time.sleep(0.05 if value == 0 else 0.0)
        self.calls.append(value)
        return self.calls

    def seen_at_import(self) -> dict[str, str | None]:
        return SEEN_AT_IMPORT

    def thread(self) -> int:
        return threading.get_ident()

    def in_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def say(self, text: str) -> None:
        print(text)
        os.system(f"echo {text} of a child")

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def sleep_if_rank(self, rank: int, seconds: float) -> None:
        time.sleep(seconds if self.rank() == rank else 0.0)

    def fail_if_rank(self, rank: int) -> None:
        """That rank raises; the others hang, as in a collective."""
        if self.rank() == rank:
            print("about to fail")
            raise ArithmeticError("loss is\nnot finite")
        time.sleep(60)

    def die_if_rank(self, rank: int) -> None:
        """That rank dies; the others raise first, as a collective whose peer is gone."""
        if self.rank() == rank:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("connection closed by peer")

    def unsendable(self) -> object:
        return threading.Lock()

    def spin(self) -> None:
        """Keep the main thread and the interpreter lock busy for ever."""
        while True:
            pass

    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def map_shared_memory(self, path: str) -> None:
        self.segment = np.memmap(path, dtype=np.uint8, mode="r+")


class BrokenConstructor:
    def __init__(self) -> None:
        raise ValueError("no such model")
