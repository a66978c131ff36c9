"""How one engine rank joins the others: a vLLM executor that starts no process.

vLLM's external launcher is made for this: every tensor-parallel rank is a process of its own that runs the same engine
on the same requests, and since scheduling and sampling are deterministic the ranks stay in step without talking about
it. Only the rendezvous differs here. Upstream takes it from ``env://``, and its CPU worker then names its shared memory
after that string, the same for every engine of a machine; a port keeps engines apart.
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

RENDEZVOUS_KEY = "megarl_rendezvous"
RANK_KEY = "megarl_rank"


class OneRankExecutor(ExecutorWithExternalLauncher):
    """Runs this process's rank; expects both keys above in vLLM's ``additional_config``."""

    def _distributed_args(self) -> tuple[str, int, int]:
        """Init method, rank and local rank."""
        settings = self.vllm_config.additional_config
        rank = settings[RANK_KEY]
        return f"tcp://{settings[RENDEZVOUS_KEY]}", rank, rank
