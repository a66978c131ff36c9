"""Engine ranks with weaknesses, for tests."""

from __future__ import annotations

import os
import time

from megarl.rollout import vllm_weights
from megarl.rollout.vllm_engine import VllmWorker


class SlowWorker(VllmWorker):
    """Says who it is, and waits before it installs."""

    def pid(self) -> int:
        return os.getpid()

    def _install(self, version: int) -> None:
        time.sleep(20)
        super()._install(version)


class ForgetfulWorker(VllmWorker):
    """Can be told to leave new weights unpacked, as vLLM's reloading does here and there."""

    def forget_to_pack(self, forget: bool) -> None:
        if forget:
            self._pack = vllm_weights._pack
            vllm_weights._pack = lambda module: None
        else:
            vllm_weights._pack = self._pack
