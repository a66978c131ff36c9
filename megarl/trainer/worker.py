"""One trainer rank: what a trainer process does when the driver calls it.

Every method runs on all ranks at once; methods that return something for the driver return it on the ranks named in
their docstring and None elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.losses import policy_loss, supervised_loss
from megarl.config import ParallelConfig
from megarl.ports import free_port
from megarl.precision import RECIPES
from megarl.trainer import cpu
from megarl.trainer.settings import WorkerSettings, layout_of

cpu.prepare()  # before Megatron-Core is imported: it decides at import what it may use

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from megarl.trainer import checkpoint  # noqa: E402
from megarl.trainer.forward import DeviceBatch, LogprobSettings, Loss, run_micro_batches, token_logprobs  # noqa: E402
from megarl.trainer.model import build_model, live_tensors, load_weights, parameter_names  # noqa: E402
from megarl.trainer.optimizer import build_optimizer  # noqa: E402
from megarl.types import MicroBatch  # noqa: E402
from megarl.weights.export import owned_tiles, write_tiles  # noqa: E402
from megarl.weights.spec import ModelSpec  # noqa: E402
from megarl.weights.tensor_files import FilePlan  # noqa: E402
from megarl.weights.transports.transport import Transport, Written  # noqa: E402


class TrainerWorker:
    """Holds this rank's shard of the model, in one chunk or several, and its optimizer."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._rank = int(os.environ["RANK"])
        self._spec = ModelSpec.from_folder(settings.trainer.model)
        self._layout = layout_of(settings.trainer.parallel)

    @staticmethod
    def free_port() -> int:
        """A port of this rank's machine that is free; rank 0's is where the ranks meet."""
        return free_port()

    def setup(self, port: int) -> str:
        """Meet the other ranks at ``port``, build the model and fill it from its folder; says what was built."""
        trainer, sizes = self._settings.trainer, self._settings.trainer.parallel
        os.environ["MASTER_PORT"] = str(port)
        self._device = _init_distributed(sizes, trainer.timeout_s, self._settings.seed)
        self._chunks = build_model(self._spec, trainer, self._layout)
        load_weights(self._chunks, trainer.model, self._spec, self._layout, self._rank)
        self._optimizer, self._scheduler = build_optimizer(
            self._chunks,
            trainer.optimizer,
            bf16=RECIPES[trainer.precision.recipe].bf16,
            max_steps=self._settings.max_steps,
        )
        self._optimizer.reload_model_params()
        if self._settings.algorithm.kl.coef:  # kept in host memory; without a penalty nothing is kept
            self._reference = {n: t.detach().cpu().clone() for n, t in live_tensors(self._chunks).items()}
        count = sum(tensor.numel() for tensor in live_tensors(self._chunks).values())
        return f"rank {self._rank}: {count:,} parameters, {parameter_names()} layers"

    # --- passes over micro-batches -------------------------------------------------------------------------------

    def score(
        self, micro_batches: Sequence[MicroBatch], temperature: float | None, reference: bool
    ) -> list[np.ndarray] | None:
        """Log-probability of every label, fp32 [T] per micro-batch; from tp rank 0 of the last stage."""
        settings = self._logprob_settings(temperature)

        def keep(logits_TV: Tensor, batch: DeviceBatch) -> tuple[Tensor, np.ndarray]:
            logprobs = token_logprobs(logits_TV, batch, settings).logprob
            return logprobs.sum(), logprobs.cpu().numpy()

        with torch.no_grad(), self._reference_weights() if reference else nullcontext():
            reports = run_micro_batches(self._chunks, micro_batches, keep, self._device, forward_only=True)
        return reports if self._reports() else None

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Any] | None:
        """One policy update; summed metrics of this data-parallel rank, from tp rank 0 of the last stage."""
        return self._update(micro_batches, self._policy_loss)

    def supervised_step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Any] | None:
        """One supervised update; otherwise as ``train_step``."""
        return self._update(micro_batches, self._supervised_loss)

    def _policy_loss(self, logits_TV: Tensor, batch: DeviceBatch) -> tuple[Tensor, Any]:
        out = token_logprobs(logits_TV, batch, self._logprob_settings())
        return policy_loss(out.logprob, out.entropy, batch, self._settings.algorithm)

    def _supervised_loss(self, logits_TV: Tensor, batch: DeviceBatch) -> tuple[Tensor, Any]:
        return supervised_loss(token_logprobs(logits_TV, batch, self._logprob_settings(1.0)).logprob, batch)

    def _update(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> dict[str, Any] | None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        reports = run_micro_batches(self._chunks, micro_batches, loss, self._device, forward_only=False)
        grad_norm, skipped = self._optimizer_step()
        if not self._reports():
            return None
        return {"sums": reports, "grad_norm": grad_norm, "skipped": skipped, "lr": self._scheduler.get_lr({})}

    def _optimizer_step(self) -> tuple[float, bool]:
        """(gradient norm before clipping, whether a gradient that is not finite made us skip)."""
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not np.isfinite(norm):
            return norm, True
        self._scheduler.step(1)
        self._optimizer.step()
        return norm, False

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """The model holds the frozen reference policy while inside."""
        current = {name: tensor.detach().clone() for name, tensor in live_tensors(self._chunks).items()}
        self._copy_in(self._reference)
        try:
            yield
        finally:
            self._copy_in(current)

    def _copy_in(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in live_tensors(self._chunks).items():
                tensor.copy_(weights[name])

    def _logprob_settings(self, temperature: float | None = None) -> LogprobSettings:
        return LogprobSettings(
            temperature=self._settings.temperature if temperature is None else temperature,
            valid_vocab=self._spec.vocab,
            entropy_in_loss=self._settings.algorithm.entropy_coef != 0.0,
        )

    def _reports(self) -> bool:
        return bool(parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0)

    # --- weights out -----------------------------------------------------------------------------------------------

    def free_endpoint(self) -> str:
        """``host:port`` that is free now; rank 0's is on the machine that all know as the master."""
        return f"{os.environ['MASTER_ADDR']}:{self.free_port()}"

    def attach(self, transport: Transport) -> None:
        """Make this rank's side of what weights go through."""
        self._writer = transport.writer(self._rank)

    def stage(self, version: int) -> Written:
        """Send this rank's share of ``version``."""
        return self._writer.write(version, live_tensors(self._chunks))

    def write_export(self, folder: Path, plan: FilePlan) -> int:
        """Fill this rank's share of the files of an export; bytes written."""
        tiles = owned_tiles(self._spec, self._layout, self._rank, parameter_names())
        return write_tiles(folder, plan, tiles, live_tensors(self._chunks))

    def close(self) -> None:
        """Leave the other ranks, so that another layout can be set up in this process."""
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write this rank's share of the checkpoint."""
        checkpoint.save(folder, self._chunks, self._optimizer, self._scheduler, self._rank)

    def load(self, folder: Path) -> None:
        """Read this rank's share of the checkpoint."""
        checkpoint.load(folder, self._chunks, self._optimizer, self._scheduler, self._rank)


def _init_distributed(sizes: ParallelConfig, timeout_s: float, seed: int) -> torch.device:
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout_s))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    model_parallel_cuda_manual_seed(seed)
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
