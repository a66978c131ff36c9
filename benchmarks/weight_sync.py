"""The weight bridge against the usual way: ``python benchmarks/weight_sync.py --json FILE``.

Two random bf16 models of more than 300 M parameters, a dense one and a mixture of experts, trained at TP 2 (x EP 2) and
served at TP 2, or at ``--engine-tp``, on one machine in one run. In turns:

    megarl   shard to shard through shared memory: stage, check, pack beside what is served; pause, exchange, resume
    usual    every tensor gathered to the whole Hugging Face one by all-gather, written once to shared memory, and given
             to vLLM's layerwise reload on every engine rank, with the two repairs it needs on CPU (tied heads,
             experts); generation pauses for the reload

Every key of the JSON object and its unit is listed in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from megarl.config import AlgorithmConfig, ParallelConfig, PrecisionConfig, RolloutConfig, TrainerConfig
from megarl.orchestration.memory import return_memory, reuse_memory
from megarl.orchestration.ray_workers import RayCluster, RayWorkers
from megarl.rollout.engine import VllmEngines
from megarl.rollout.vllm_engine import VllmWorker
from megarl.trainer.settings import WorkerSettings, layout_of
from megarl.trainer.trainer import MegatronTrainer
from megarl.trainer.worker import TrainerWorker
from megarl.weights.engine_layout import engine_layout_of
from megarl.weights.megatron_layout import megatron_params
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
from megarl.weights.tensor_files import Place, create_files, plan_files
from megarl.weights.transports.shm import SharedMemory
from megarl.weights.transports.transport import Cargo

_SMALL: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
MODELS: dict[str, tuple[dict[str, Any], ParallelConfig]] = {
    "dense": (
        {**_SMALL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 18}
        | {"intermediate_size": 4096},
        ParallelConfig(world_size=2, tp=2),
    ),
    "moe": (
        {**_SMALL, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 10}
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "intermediate_size": 1024},
        ParallelConfig(world_size=2, tp=2, ep=2),
    ),
}
_ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
_SIDE_METHODS = ("receive", "pause", "install", "rollback", "resume")
_TIMEOUT_S = 300.0


class GatheringTrainer(TrainerWorker):
    """A trainer rank that can also do it the usual way."""

    def gather(self, places: dict[str, Place]) -> float:
        """Gather every parameter from both ranks; rank 0 writes the whole tensors. Seconds."""
        start = time.perf_counter()
        size = self._layout.world_size
        shards = [megatron_params(self._spec, self._layout, rank) for rank in range(size)]
        files = {place.file for place in places.values()} if self._rank == 0 else set()
        maps = {f: torch.from_file(f, shared=True, size=Path(f).stat().st_size, dtype=torch.uint8) for f in files}
        for name, tensor in self._live().items():
            parts = [torch.empty_like(tensor) for _ in range(size)]
            torch.distributed.all_gather(parts, tensor.contiguous())
            for rank in range(size) if self._rank == 0 else ():
                for tile in shards[rank][name].tiles:
                    place, of, to = places[tile.hf_name], tile.rect, tile.hf_rect
                    end = place.offset + tensor.element_size() * torch.Size(place.shape).numel()
                    whole = maps[place.file][place.offset : end].view(tensor.dtype).view(place.shape[0], -1)
                    part = parts[rank].view(parts[rank].shape[0], -1)[of.row0 : of.row1, of.col0 : of.col1]
                    whole[to.row0 : to.row1, to.col0 : to.col1] = part
        return time.perf_counter() - start

    def change(self) -> None:
        """What an optimizer step does to the weights: they are all others."""
        with torch.no_grad():
            for tensor in self._live().values():
                tensor.mul_(1.0009765625 if tensor.ndim > 1 else 1.0).add_(2**-12)

    def _live(self) -> dict[str, torch.Tensor]:
        from megarl.trainer.model import live_tensors

        return {name: tensor.detach() for name, tensor in live_tensors(self._chunks).items()}


class ReloadingEngine(VllmWorker):
    """An engine rank that can also take whole tensors by vLLM's own reload."""

    def reload(self, file: str) -> float:
        """Load the whole tensors of ``file``, and repair what the reload leaves wrong on CPU. Seconds."""
        from safetensors import safe_open
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        start = time.perf_counter()
        runner = self._engine.model_executor.driver_worker.model_runner
        model, config = runner.model, self._engine.vllm_config
        with torch.no_grad(), set_current_vllm_config(config):
            initialize_layerwise_reload(model)
            with safe_open(file, framework="pt") as tensors:
                model.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
            finalize_layerwise_reload(model, config.model_config)
            for name, module in model.named_modules():
                method = getattr(module, "quant_method", None)
                if name.endswith("lm_head"):
                    method.process_weights_after_loading(module)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel.fused_experts.process_weights_after_loading(module)
        return time.perf_counter() - start

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()


class PeakMemory:
    """Largest memory of some processes whenever it is entered, beyond what they have now (private pages, bytes)."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._before = self._now()
        self.extra_bytes = 0

    def _now(self) -> list[int]:
        return [process.memory_full_info().uss for process in self._processes]

    def __enter__(self) -> PeakMemory:
        self.extra_bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            grown = max(now - before for now, before in zip(self._now(), self._before, strict=True))
            self.extra_bytes = max(self.extra_bytes, grown)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def main() -> None:
    """Measure both models, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--engine-tp", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "engine_tp": options.engine_tp}
    for name in options.models:
        with (
            tempfile.TemporaryDirectory(prefix="megarl-bench-") as folder,
            asyncio.Runner() as runner,
            RayCluster(num_cpus=16) as cluster,
        ):
            measured = runner.run(_measure(cluster, name, options.engine_tp, options.repeats, Path(folder)))
        result |= {f"{name}_{key}": value for key, value in measured.items()}
        print(json.dumps(result, indent=2), flush=True)
    scratch = options.json.with_suffix(".tmp")
    scratch.write_text(json.dumps(result, indent=2) + "\n")
    scratch.rename(options.json)


def _write_model(folder: Path, config: dict[str, Any]) -> ModelSpec:
    """Random weights, norms around 1."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_folder(folder)
    torch.manual_seed(0)
    tensors = {n: (torch.randn(s) * 0.02 + (len(s) == 1)).bfloat16() for n, s in spec.hf_tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return spec


async def _measure(cluster: RayCluster, name: str, tp: int, repeats: int, root: Path) -> dict[str, Any]:
    config, sizes = MODELS[name]
    spec = _write_model(root / "model", config)
    trainer_config = TrainerConfig(model=root / "model", parallel=sizes, precision=PrecisionConfig(recipe="bf16"))
    engine_config = RolloutConfig(
        tensor_parallel=tp, max_model_len=128, max_tokens=8, max_num_seqs=4, kv_cache_gib=0.1, timeout_s=_TIMEOUT_S
    )
    settings = WorkerSettings(trainer_config, AlgorithmConfig(), temperature=1.0, seed=0, max_steps=1)
    trainer_ranks = await _workers(cluster, "trainer", "GatheringTrainer", (settings,), sizes.world_size, root)
    trainer = MegatronTrainer(trainer_ranks, trainer_config)
    await trainer.setup()
    engine_ranks = await _workers(cluster, "engine", "ReloadingEngine", (engine_config, root / "model"), tp, root)
    engines = VllmEngines(engine_ranks, engine_config)
    await engines.setup()
    plan = make_plan(spec, layout_of(sizes), engine_layout_of(engine_config))
    transport = SharedMemory(f"bench-{os.getpid()}", Cargo(plan, "bf16"))
    memory = PeakMemory(await engine_ranks.call("pid", timeout_s=30))
    whole = Path(f"/dev/shm/megarl-bench-whole-{os.getpid()}.safetensors")
    with transport.opened():
        await asyncio.gather(trainer.attach(transport), engines.attach(transport))
        ours, usual = [], []
        try:
            await _megarl(trainer, engines, 0, memory)  # warm: pages, handlers, connections
            for version in range(1, repeats + 1):
                await trainer_ranks.call("change", timeout_s=_TIMEOUT_S)
                ours.append(await _megarl(trainer, engines, version, memory))
                scores = await engines.score(_PROMPTS)
                usual.append(await _usual(trainer_ranks, engine_ranks, spec, whole, memory))
                _require_same(scores, await engines.score(_PROMPTS))
        finally:
            whole.unlink(missing_ok=True)
    bound = sum(plan.num_bytes(rank, 2) for rank in range(tp))
    return _summary(spec, ours, usual, bound, max(plan.num_bytes(rank, 2) for rank in range(tp)))


_PROMPTS = [tuple(range(2, 60))]


async def _workers(
    cluster: RayCluster, group: str, target: str, args: tuple[Any, ...], size: int, root: Path
) -> RayWorkers:
    return await cluster.workers(
        group,
        f"benchmarks.weight_sync:{target}",
        [args] * size,
        env=[{**_ENV, **(reuse_memory() if group == "engine" else return_memory())}] * size,
        log_folder=root / "logs",
        side_methods=_SIDE_METHODS if group == "engine" else (),
    )


async def _megarl(trainer: MegatronTrainer, engines: VllmEngines, version: int, memory: PeakMemory) -> dict[str, float]:
    """One sync as ``BridgeSync`` does it, phase by phase; the checks of the modules are part of it."""
    with memory:
        clock = [time.perf_counter()]

        def lap() -> float:
            clock.append(time.perf_counter())
            return clock[-1] - clock[-2]

        staged, statuses = await asyncio.gather(trainer.stage_weights(version), engines.receive(version))
        assert not any(status.error for status in statuses), statuses
        stage_s = lap()
        await engines.pause()
        installed = await engines.install(version)
        assert not any(status.error for status in installed), installed
        await engines.resume(version)
        pause_s = lap()
    return {
        "total_s": stage_s + pause_s,
        "stage_s": stage_s,
        "pause_s": pause_s,
        "bytes": staged.num_bytes,
        "extra": memory.extra_bytes,
    }


async def _usual(
    trainer: RayWorkers, engines: RayWorkers, spec: ModelSpec, whole: Path, memory: PeakMemory
) -> dict[str, float]:
    plan = plan_files({name: (shape, "BF16") for name, shape in spec.hf_tensors().items()}, stem=whole.stem)
    if not whole.exists():
        create_files(whole.parent, plan)
    places = {n: Place(str(whole), p.offset, p.shape, p.dtype) for n, p in plan.places.items()}
    with memory:
        gather_s = max(await trainer.call("gather", places, timeout_s=_TIMEOUT_S))
        reload_s = max(await engines.call("reload", str(whole), timeout_s=_TIMEOUT_S))
    model_bytes = spec.num_params * 2
    return {
        "total_s": gather_s + reload_s,
        "gather_s": gather_s,
        "pause_s": reload_s,
        "bytes": model_bytes * (1 + engines.size),  # written once, read whole by every engine rank
        "extra": memory.extra_bytes,
    }


def _require_same(one: list[list[float]], other: list[list[float]]) -> None:
    """Both ways must lead to the same engine, or one of them did less than its work."""
    worst = max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    if worst > 1e-6:
        raise RuntimeError(f"after both ways the engine's log-probabilities differ by {worst:.2e}")


def _summary(
    spec: ModelSpec, ours: list[dict[str, float]], usual: list[dict[str, float]], bound: int, shard: int
) -> dict[str, Any]:
    def median(rows: list[dict[str, float]], key: str | Callable[[dict[str, float]], float]) -> float:
        return statistics.median(row[key] if isinstance(key, str) else key(row) for row in rows)

    ratios = [theirs["total_s"] / mine["total_s"] for mine, theirs in zip(ours, usual, strict=True)]
    return {
        "parameters": spec.num_params,
        "megarl_total_s": median(ours, "total_s"),
        "megarl_stage_s": median(ours, "stage_s"),
        "megarl_pause_s": median(ours, "pause_s"),
        "megarl_pause_share": median(ours, lambda row: row["pause_s"] / row["total_s"]),
        "megarl_bytes": median(ours, "bytes"),
        "megarl_bytes_ratio": median(ours, "bytes") / bound,
        "megarl_extra_memory_bytes": max(row["extra"] for row in ours),
        "usual_total_s": median(usual, "total_s"),
        "usual_gather_s": median(usual, "gather_s"),
        "usual_pause_s": median(usual, "pause_s"),
        "usual_bytes": median(usual, "bytes"),
        "usual_extra_memory_bytes": max(row["extra"] for row in usual),
        "largest_shard_bytes": shard,
        "speedup": statistics.median(ratios),
        "speedups": [round(ratio, 2) for ratio in ratios],
    }


if __name__ == "__main__":
    main()
