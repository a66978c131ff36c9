"""The driver's side of the trainer: packs what the ranks need, calls them, and adds up what they report."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import TrainerConfig
from megarl.data.packing import pack_for_scoring
from megarl.interfaces import Workers
from megarl.types import MicroBatch, Sample, StagedWeights, TrainBatch, UpdateMetrics
from megarl.weights.export import KEPT_FILES, exported_dtypes
from megarl.weights.folders import appearing
from megarl.weights.spec import ModelSpec
from megarl.weights.tensor_files import create_files, plan_files
from megarl.weights.transports.transport import Transport, Written


class MegatronTrainer:
    """A ``PolicyTrainer`` over a group of ``TrainerWorker`` processes."""

    def __init__(self, workers: Workers, config: TrainerConfig) -> None:
        self._workers = workers
        self._config = config
        self._spec = ModelSpec.from_folder(config.model)
        self.dp_size = config.parallel.dp

    async def setup(self) -> list[str]:
        """Build every rank's model; one line per rank about what was built."""
        ports = await self._call("free_port")  # asked for just before it is used: a port does not stay free
        return await self._call("setup", ports[0])

    async def score(
        self, samples: Sequence[Sample], *, temperature: float | None = None, reference: bool = False
    ) -> list[np.ndarray]:
        """Log-probability of every token given the ones before it, fp32 [L] per sample, 0 at token 0."""
        packed = pack_for_scoring(samples, self._config, dp_size=self.dp_size)
        answers = await self._call_by_dp_rank("score", packed.micro_batches, temperature, reference)
        return packed.unpack(self._by_dp_rank(answers))

    async def train_step(self, batch: TrainBatch) -> UpdateMetrics:
        """One policy update; an empty batch is skipped."""
        return await self._update("train_step", batch)

    async def supervised_step(self, batch: TrainBatch) -> UpdateMetrics:
        """One supervised update."""
        return await self._update("supervised_step", batch)

    async def _update(self, method: str, batch: TrainBatch) -> UpdateMetrics:
        if batch.num_loss_tokens == 0:
            return UpdateMetrics({}, skipped=True)
        answers = self._by_dp_rank(await self._call_by_dp_rank(method, batch.micro_batches))
        values = mean_of_sums([sums for answer in answers for sums in answer["sums"]])
        values |= {"grad_norm": answers[0]["grad_norm"], "lr": answers[0]["lr"]}
        return UpdateMetrics(values, skipped=answers[0]["skipped"])

    async def free_endpoint(self) -> str:
        """``host:port`` on the machine of rank 0 that is free now."""
        return str((await self._call("free_endpoint"))[0])

    async def attach(self, transport: Transport) -> None:
        """Connect every rank to what weights go through."""
        self._transport = transport
        await self._call("attach", transport)

    async def stage_weights(self, version: int) -> StagedWeights:
        """Send every shard under ``version``."""
        self._transport.begin(version)
        written = Written()
        for of_rank in await self._call("stage", version):
            written |= of_rank
        self._transport.publish(version)
        return StagedWeights(tuple(self._transport.content_digests(written.checksums)), written.num_bytes)

    async def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder, in the number format of the model's config.json."""
        with appearing(folder) as scratch:
            dtypes = exported_dtypes(self._config.model, self._spec)
            plan = plan_files({name: (shape, dtypes[name]) for name, shape in self._spec.hf_tensors().items()})
            create_files(scratch, plan)
            await self._call("write_export", scratch, plan)
            for name in ("config.json", *KEPT_FILES):
                if (self._config.model / name).is_file():
                    shutil.copy(self._config.model / name, scratch / name)

    async def save(self, folder: Path) -> None:
        """Write model, optimizer, scheduler and RNG state below ``folder``."""
        await self._call("save", folder)

    async def load(self, folder: Path) -> None:
        """Read what ``save`` wrote."""
        await self._call("load", folder)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self._workers.call(method, *args, timeout_s=self._config.timeout_s)

    async def _call_by_dp_rank(self, method: str, batches: Sequence[Sequence[MicroBatch]], *rest: Any) -> list[Any]:
        args = [(batches[self._dp_rank(rank)], *rest) for rank in range(self._workers.size)]
        return await self._workers.call_each(method, args, timeout_s=self._config.timeout_s)

    def _dp_rank(self, rank: int) -> int:
        """Megatron's rank order is tp fastest, then cp, dp, pp."""
        sizes = self._config.parallel
        return rank // (sizes.tp * sizes.cp) % sizes.dp

    def _by_dp_rank(self, answers: Sequence[Any]) -> list[Any]:
        """The one answer of every data-parallel rank, in order."""
        found = {self._dp_rank(rank): answer for rank, answer in enumerate(answers) if answer is not None}
        assert len(found) == self.dp_size, f"{len(found)} of {self.dp_size} data-parallel ranks reported"
        return [found[dp_rank] for dp_rank in range(self.dp_size)]


def mean_of_sums(reports: Sequence[dict[str, tuple[float, float]]]) -> dict[str, float]:
    """Metrics from (sum, weight) pairs of all micro-batches; a weight of 0 marks a plain sum."""
    values = {}
    for name in sorted({name for report in reports for name in report}):
        total = sum(report[name][0] for report in reports if name in report)
        weight = sum(report[name][1] for report in reports if name in report)
        values[name] = total / weight if weight else total
    return values
