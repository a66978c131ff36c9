"""What a trainer process does in the layout tests: build one layout after another and tell what it computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megarl.trainer.worker import TrainerWorker  # first: it prepares Megatron for this machine

# isort: split
from megatron.core import parallel_state

from megarl.trainer.forward import DeviceBatch, run_micro_batches
from megarl.trainer.model import live_tensors, parameter_names
from megarl.trainer.settings import WorkerSettings
from megarl.types import MicroBatch
from megarl.weights.mappings import Rect
from megarl.weights.megatron_layout import megatron_params

Piece = tuple[str, Rect, np.ndarray]
"""(Hugging Face tensor, rectangle of it, values)"""


class LayoutRanks:
    """One rank of whatever layout it is asked for."""

    free_port = staticmethod(TrainerWorker.free_port)

    def logits(
        self, settings: WorkerSettings, micro_batches: Sequence[Sequence[MicroBatch]], port: int
    ) -> np.ndarray | None:
        """[T, V] of the first micro-batch, from tp rank 0 of the last stage of data-parallel rank 0."""
        worker = _worker(settings, port)
        found = []

        def keep(logits_TV: torch.Tensor, batch: DeviceBatch) -> tuple[torch.Tensor, None]:
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(logits_TV) for _ in range(group.size())]
            torch.distributed.all_gather(parts, logits_TV.contiguous(), group=group)
            found.append(torch.cat(parts, dim=-1)[:, : worker._spec.vocab].float().numpy())
            return logits_TV.sum(), None

        dp_rank = parallel_state.get_data_parallel_rank()
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            run_micro_batches(worker._chunks, micro_batches[dp_rank], keep, worker._device, forward_only=True)
        worker.close()
        return found[0] if found and dp_rank == 0 and tp_rank == 0 else None

    def gradients(
        self, settings: WorkerSettings, micro_batches: Sequence[Sequence[MicroBatch]], port: int
    ) -> tuple[list[dict[str, tuple[float, float]]], list[Piece]]:
        """(summed metrics where this rank reports, reduced gradients in Hugging Face coordinates)."""
        worker = _worker(settings, port)
        for chunk in worker._chunks:
            chunk.zero_grad_buffer()
        batches = micro_batches[parallel_state.get_data_parallel_rank()]
        reports = run_micro_batches(worker._chunks, batches, worker._policy_loss, worker._device, forward_only=False)
        sums = reports if worker._reports() else []
        for chunk in worker._chunks:
            _gather_gradients(chunk)
        shards = megatron_params(worker._spec, worker._layout, worker._rank, parameter_names())
        pieces = []
        for name, parameter in live_tensors(worker._chunks).items():
            if shards[name].is_copy or not hasattr(parameter, "main_grad"):  # buffers have no gradient
                continue
            gradient = parameter.main_grad.reshape(parameter.shape[0], -1).numpy()
            for tile in shards[name].tiles:
                part = gradient[tile.rect.row0 : tile.rect.row1, tile.rect.col0 : tile.rect.col1]
                pieces.append((tile.hf_name, tile.hf_rect, part.copy()))
        worker.close()
        return sums, pieces


def _worker(settings: WorkerSettings, port: int) -> TrainerWorker:
    torch.set_num_threads(1)
    worker = TrainerWorker(settings)
    worker.setup(port)
    return worker


def _gather_gradients(model: torch.nn.Module) -> None:
    """Each data-parallel rank reduced its own part of the gradients; put the parts together on all of them."""
    for buffer in [*model.buffers, *model.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, part, group=group)
