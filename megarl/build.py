"""The composition root: from a config to a running system. The only file that names backends."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from megarl.algorithms.algorithm import PolicyGradient
from megarl.config import RunConfig
from megarl.config_errors import users_mistake
from megarl.data.prompts import Task, make_task
from megarl.data.renderer import Renderer
from megarl.envs.single_turn import SingleTurn
from megarl.interfaces import Tracker
from megarl.logs import recorded
from megarl.loop import System, train
from megarl.orchestration.memory import return_memory, reuse_memory
from megarl.orchestration.placement import Colocated, Disaggregated
from megarl.orchestration.ray_workers import RayCluster
from megarl.orchestration.threads import thread_env
from megarl.preflight import has_gpu
from megarl.recovery.checkpoint import Checkpoints
from megarl.rewards import make_rewards
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.engine import VllmEngines
from megarl.rollout.evaluator import HeldOutEvaluator
from megarl.rollout.rollouter import StreamRollouter
from megarl.sft import SEED_OFFSET, sft_optimizer, warm_start
from megarl.tracking.boundary import Trackers
from megarl.tracking.run import CURVES_FILE, add_curves, mlflow_uri, open_tracker
from megarl.tracking.summary import Places, run_summary
from megarl.trainer.settings import WorkerSettings, layout_of
from megarl.trainer.trainer import MegatronTrainer
from megarl.weights.convert import Converted, Job, finish, prepare_export, prepare_import
from megarl.weights.engine_layout import engine_layout_of
from megarl.weights.megatron_files import MegatronFiles
from megarl.weights.megatron_layout import Names
from megarl.weights.plan import make_plan
from megarl.weights.spec import ModelSpec
from megarl.weights.sync import BridgeSync, ProbeRule
from megarl.weights.transports.disk import Disk
from megarl.weights.transports.p2p import PointToPoint
from megarl.weights.transports.shm import SharedMemory
from megarl.weights.transports.transport import DTYPES, Cargo, Transport

_PROBE_PROMPTS = 4
_CONVERT_S = 3600.0
"""Deadline of one rank's share of a conversion."""
_BF16_RULE = ProbeRule("mean", 0.25)


async def run_training(config: RunConfig) -> str:
    """``megarl train``: the summary of the finished run."""
    checkpoints = _checkpoints(config)
    resumed = checkpoints.newest_state() if checkpoints.committed() else None
    tracker = open_tracker(config, resumed)
    try:
        with recorded(config.run_folder / "logs/driver.log"):
            async with _system(config, tracker) as system:
                await train(system, config)
    except BaseException as error:
        tracker.close("KILLED" if isinstance(error, asyncio.CancelledError) else "FAILED")
        raise
    add_curves(config, tracker)
    tracker.close("FINISHED")
    places = Places(
        checkpoint=next(reversed(checkpoints.committed()), None),
        curves=config.run_folder / CURVES_FILE,
        mlflow_run=tracker.run_id,
        mlflow_uri=mlflow_uri(config),
    )
    return run_summary(config.run_folder, places)


async def run_sft(config: RunConfig) -> str:
    """``megarl sft``: where the warm-started policy was written."""
    from rich.progress import Progress

    config = config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"optimizer": sft_optimizer(config)}),
            "max_steps": config.sft.steps,
        }
    )
    losses: list[float] = []
    with RayCluster() as cluster:
        trainer = await _start_trainer(cluster, config)
        task = make_task(config.data, config.seed + SEED_OFFSET)
        with Progress() as progress:
            bar = progress.add_task("warm start", total=config.sft.steps)

            def report(step: int, loss: float) -> None:
                progress.update(bar, completed=step)
                losses.append(loss)

            await warm_start(trainer, task, _renderer(config), config, report)
        await trainer.export(config.sft.output)
    return f"{config.sft.steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}; wrote {config.sft.output}"


async def run_evaluation(config: RunConfig) -> str:
    """``megarl eval``: held-out accuracy of the newest checkpoint."""
    async with _system(config, Trackers([])) as system:
        state = await system.recovery.restore(system.trainer)
        await system.weights.sync(version=state.step)
        report = await system.evaluator.run(state.step)
    return (
        f"step {report.version}: held-out accuracy {report.accuracy:.3f} on {report.num_prompts} problems, "
        f"{report.mean_completion_tokens:.1f} tokens an answer"
    )


async def run_export(config: RunConfig, output: Path) -> str:
    """``megarl export``: where the newest checkpoint's weights were written."""
    with RayCluster() as cluster:
        trainer = await _start_trainer(cluster, config)
        state = await _checkpoints(config).restore(trainer)
        await trainer.export(output)
    return f"wrote the policy of step {state.step} to {output}"


async def run_import(source: Path, output: MegatronFiles) -> str:
    """``megarl import``: what was written."""
    with users_mistake():
        job = prepare_import(source, output)
    summary = await _convert(job, "importing")
    finish(job, output.folder)
    return f"wrote {output.layout.world_size} ranks to {output.folder}: {summary}"


async def run_export_of_shards(source: MegatronFiles, output: Path) -> str:
    """``megarl export`` of Megatron shards: what was written."""
    with users_mistake():
        job = prepare_export(source, output)
    summary = await _convert(job, "exporting")
    finish(job, output)
    return f"wrote {len(job.plan.sizes)} files to {output}: {summary}"


async def _convert(job: Job, what: str) -> str:
    """Every rank once, on as many processes as there are cores."""
    from rich.progress import Progress

    size = min(job.num_ranks, len(os.sched_getaffinity(0)))
    found: list[Converted] = []
    with RayCluster() as cluster:
        workers = await cluster.workers(
            "converter",
            "megarl.weights.convert:Converter",
            [()] * size,
            env=[_process_env(size)] * size,
            log_folder=job.scratch / "logs",
        )
        with Progress() as progress:
            bar = progress.add_task(what, total=job.num_ranks)
            for first in range(0, job.num_ranks, size):
                ranks = [first + place if first + place < job.num_ranks else None for place in range(size)]
                answers = await workers.call_each("convert", [(job, rank) for rank in ranks], timeout_s=_CONVERT_S)
                found += [answer for answer in answers if answer is not None]
                progress.update(bar, completed=len(found))
    shutil.rmtree(job.scratch / "logs")
    moved, resumed = sum(one.num_bytes for one in found), sum(one.resumed_bytes for one in found)
    peak = max(one.peak_bytes for one in found)
    before = f" ({resumed / 1e6:,.1f} MB found done)" if resumed else ""
    return f"{moved / 1e6:,.1f} MB{before}, at most {peak / 2**20:,.0f} MiB of memory a process"


@asynccontextmanager
async def _system(config: RunConfig, tracker: Tracker) -> AsyncIterator[System]:
    """Everything a run consists of, started; all of it is gone afterwards."""
    cargo = _cargo(config)
    with RayCluster() as cluster:  # its start cannot be interrupted: what has to be tidied up comes after
        local = _local_transport(config, cargo)
        with local.opened() if local else nullcontext():
            trainer, engines = await asyncio.gather(_start_trainer(cluster, config), _start_engines(cluster, config))
            transport = local or await _point_to_point(config, cargo, trainer)
            await asyncio.gather(trainer.attach(transport), engines.attach(transport))
            yield _assemble(config, trainer, engines, cargo, tracker)


def _cargo(config: RunConfig) -> Cargo:
    """The plan; only ranks that weights are sent to one by one have places of their own in it for every replica."""
    spec, layout = ModelSpec.from_folder(config.trainer.model), layout_of(config.trainer.parallel)
    replicas = config.rollout.replicas if config.weights.transport == "p2p" else 1
    names: Names = "te" if has_gpu() else "local"
    plan = make_plan(spec, layout, engine_layout_of(config.rollout), names, replicas=replicas)
    return Cargo(plan, config.rollout.dtype)


def _local_transport(config: RunConfig, cargo: Cargo) -> Transport | None:
    """What can be made before there are processes; None where they have to meet first."""
    if config.weights.transport == "p2p":
        return None
    if config.weights.transport == "disk":
        return Disk((config.run_folder / "weights").absolute(), cargo)
    return SharedMemory(f"{config.name}-{os.getpid()}", cargo)


async def _point_to_point(config: RunConfig, cargo: Cargo, trainer: MegatronTrainer) -> Transport:
    return PointToPoint(
        endpoint=await trainer.free_endpoint(),
        cargo=cargo,
        num_sources=config.trainer.parallel.world_size,
        tensor_parallel=config.rollout.tensor_parallel,
        timeout_s=config.trainer.timeout_s,
    )


def _assemble(
    config: RunConfig, trainer: MegatronTrainer, engines: VllmEngines, cargo: Cargo, tracker: Tracker
) -> System:
    task, renderer = make_task(config.data, config.seed), _renderer(config)
    buffer = GroupBuffer(config.prompts_per_step, config.max_staleness)
    return System(
        trainer=trainer,
        rollouter=StreamRollouter(
            task,
            _env(config, engines, renderer, config.rollout.temperature),
            make_rewards(config.rewards, task),
            buffer,
            group_size=config.group_size,
            prompts_per_step=config.prompts_per_step,
            num_prompts=config.max_steps * config.prompts_per_step,
        ),
        buffer=buffer,
        algorithm=PolicyGradient(config.algorithm),
        weights=_weight_sync(config, trainer, engines, cargo, _probe_sequences(task, renderer)),
        placement=Colocated() if config.placement.kind == "colocated" else Disaggregated(),
        evaluator=HeldOutEvaluator(
            task,
            _env(config, engines, renderer, config.data.eval.temperature),
            config.data.eval,
            max_steps=config.max_steps,
            tracker=tracker,
        ),
        recovery=_checkpoints(config),
        tracker=tracker,
    )


async def _start_trainer(cluster: RayCluster, config: RunConfig) -> MegatronTrainer:
    size = config.trainer.parallel.world_size
    settings = WorkerSettings(
        trainer=config.trainer.model_copy(update={"model": config.trainer.model.absolute()}),
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        seed=config.seed,
        max_steps=config.max_steps * config.algorithm.updates_per_step,
    )
    workers = await cluster.workers(
        "trainer",
        "megarl.trainer.worker:TrainerWorker",
        [(settings,)] * size,
        env=[{**_process_env(size), **return_memory()}] * size,
        log_folder=config.run_folder / "logs",
        num_gpus=_gpu_share(config),
    )
    trainer = MegatronTrainer(workers, config.trainer)
    await trainer.setup()
    return trainer


async def _start_engines(cluster: RayCluster, config: RunConfig) -> VllmEngines:
    size = config.rollout.replicas * config.rollout.tensor_parallel
    workers = await cluster.workers(
        "engine",
        "megarl.rollout.vllm_engine:VllmWorker",
        [(config.rollout, config.trainer.model.absolute(), None, config.weights.in_flight != "wait")] * size,
        env=[{**_process_env(size), **reuse_memory()}] * size,
        log_folder=config.run_folder / "logs",
        num_gpus=_gpu_share(config),
        side_methods=("receive", "pause", "install", "rollback", "resume"),
    )
    engines = VllmEngines(workers, config.rollout, config.weights.in_flight)
    await engines.setup()
    return engines


def _process_env(computing_processes: int) -> dict[str, str]:
    """Environment of a process that computes at the same time as ``computing_processes`` - 1 others."""
    return thread_env(len(os.sched_getaffinity(0)), computing_processes)


def _gpu_share(config: RunConfig) -> float:
    """GPUs of one rank: colocated trainer and engine ranks share them."""
    if not has_gpu():
        return 0.0
    return 0.5 if config.placement.kind == "colocated" else 1.0


def _weight_sync(
    config: RunConfig, trainer: MegatronTrainer, engines: VllmEngines, cargo: Cargo, probe: list[tuple[int, ...]]
) -> BridgeSync:
    plan, exact = cargo.plan, config.rollout.dtype == config.trainer.precision.recipe == "fp32"
    return BridgeSync(
        trainer,
        engines,
        config.weights,
        plan_digest=plan.digest,
        lower_bound_bytes=sum(plan.num_bytes(rank, DTYPES[cargo.dtype].itemsize) for rank in range(len(plan.shapes))),
        probe_sequences=probe,
        probe_rule=ProbeRule("largest", config.weights.probe_tolerance) if exact else _BF16_RULE,
    )


def _probe_sequences(task: Task, renderer: Renderer) -> list[tuple[int, ...]]:
    """A few held-out problems with their right answers."""
    prompts = task.heldout()[:_PROBE_PROMPTS]
    return [(*renderer.render(p.messages), *renderer.answer_ids(task.answer_text(p))) for p in prompts]


def _env(config: RunConfig, engines: VllmEngines, renderer: Renderer, temperature: float) -> SingleTurn:
    return SingleTurn(engines, renderer, config.rollout.max_tokens, temperature, config.seed)


def _renderer(config: RunConfig) -> Renderer:
    return Renderer(config.trainer.model, config.data.max_prompt_tokens)


def _checkpoints(config: RunConfig) -> Checkpoints:
    return Checkpoints(
        config.run_folder / "checkpoints",
        every=config.recovery.every,
        keep=config.recovery.keep,
        last_step=config.max_steps if config.recovery.last else None,
    )
