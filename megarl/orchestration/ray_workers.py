"""Process groups on Ray. The only file that imports Ray.

Every rank is a Ray actor, so a process of its own: ``Shell`` around one object of the group's class. Methods run one
after the other in one thread, as torch.distributed and Megatron want it: the process's main thread, unless the group
has side methods. Those run in a second thread and so may overtake, and Ray then gives the others a thread too.
A group never restarts a rank: after a failure the collective state of the others is worthless, and going on is the
business of checkpoints.
"""

from __future__ import annotations

import asyncio
import copy
import io
import logging
import os
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
import ray.exceptions

import megarl
from megarl.logs import last_lines
from megarl.orchestration.local_processes import LocalProcesses
from megarl.orchestration.rendezvous import Place, rendezvous
from megarl.orchestration.shell import Raised, Shell
from megarl.ports import free_port
from megarl.recovery.failure import WorkerFailed

_LOG_LINES = 20
_BLAME_S = 0.5
"""Wait for more failures after the first: peers of a dead rank may complain before Ray reports the death."""

_SIDE = "side"


class RayCluster:
    """Ray for the time of one run: on this machine, or the running cluster that the variable RAY_ADDRESS names.

    Enter it in the main thread: on Linux the processes Ray starts die with the thread that started them. That is also
    what ends them when the driver is killed.
    """

    def __init__(
        self, *, num_cpus: int | None = None, num_gpus: int | None = None, object_store_bytes: int = 512 * 2**20
    ) -> None:
        """None takes what the machine has. All three hold for a local start; a running cluster has its own."""
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus, "object_store_memory": object_store_bytes}
        self._groups: list[RayWorkers] = []
        self._given = {"CPU": 0.0, "GPU": 0.0}
        self._local = LocalProcesses()

    def __enter__(self) -> Self:
        _configure_ray()
        address = os.environ.get("RAY_ADDRESS", "local")
        handler = signal.getsignal(signal.SIGTERM)
        with self._local.starting():
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                **(self._resources if address == "local" else {}),
            )
        signal.signal(signal.SIGTERM, handler)  # ray.init puts its own in place
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker and leave Ray; nothing this cluster started on this machine stays."""
        with redirect_stdout(io.StringIO()):  # Ray prints pages about the deaths that it sees
            self._local.kill_all_but("gcs_server")  # with its server gone, ray.shutdown would wait 5 s for it
            for group in self._groups:
                group.kill()  # what runs on other machines
            ray.shutdown()
        self._local.end()

    async def workers(
        self,
        name: str,
        target: str,
        args: Sequence[tuple[Any, ...]],
        *,
        env: Sequence[Mapping[str, str]],
        log_folder: Path,
        num_cpus: float = 0,
        num_gpus: float = 0,
        side_methods: Collection[str] = (),
        start_timeout_s: float = 120.0,
    ) -> RayWorkers:
        """Start one process per entry of ``args`` and construct ``module:Class(*args[rank])`` in it, all at once.

        ``env[rank]`` is there before the process's first instruction; the variables of torch.distributed before the
        class is imported. Output goes to ``<log_folder>/<name>-<rank>.log``. A call of a side method may run while
        another method runs. ``num_cpus`` and ``num_gpus`` are per rank; CPUs only count for Ray's placement.

        Raises:
            ValueError: the cluster lacks the resources.
            WorkerFailed: a constructor raised or its process died.
            TimeoutError: a process did not start, or a constructor did not return, within ``start_timeout_s``.
        """
        size = len(args)
        assert len(env) == size, f"{len(env)} environments for {size} ranks"
        self._reserve(name, size, {"CPU": num_cpus, "GPU": num_gpus})
        log_files = [log_folder.absolute() / f"{name}-{rank}.log" for rank in range(size)]
        common: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0, "max_task_retries": 0}
        if side_methods:
            common["concurrency_groups"] = {_SIDE: 1}
        actors = [
            ray.remote(**common, runtime_env={"env_vars": _importing_megarl(env[rank])})(Shell).remote(
                f"{name}-{rank}", log_files[rank]
            )
            for rank in range(size)
        ]
        group = RayWorkers(name, actors, log_files, side_methods)
        self._groups.append(group)
        await group.build(target, args, own_device=num_gpus > 0, timeout_s=start_timeout_s)
        self._local.refresh()
        return group

    def _reserve(self, name: str, size: int, per_rank: Mapping[str, float]) -> None:
        """Ray would wait for ever for resources that do not exist."""
        total = ray.cluster_resources()
        for kind, amount in per_rank.items():
            free = total.get(kind, 0.0) - self._given[kind]
            if size * amount > free:
                raise ValueError(
                    f"{name} needs {size * amount:g} {kind} ({size} ranks x {amount:g}) and the cluster has {free:g} "
                    f"left of {total.get(kind, 0.0):g}; use fewer ranks, or a cluster with more (RAY_ADDRESS)"
                )
        for kind, amount in per_rank.items():
            self._given[kind] += size * amount


class RayWorkers:
    """A ``Workers`` group. Arrays travel through Ray's object store and arrive read-only on both sides."""

    def __init__(
        self, name: str, actors: Sequence[Any], log_files: Sequence[Path], side_methods: Collection[str]
    ) -> None:
        self.name, self.size = name, len(actors)
        self._actors, self._log_files = actors, log_files
        self._side_methods = frozenset(side_methods)
        self._failure: WorkerFailed | TimeoutError | None = None

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Run ``method(*args)`` on every rank; results in rank order.

        Raises:
            WorkerFailed: a rank raised or died, in this call or an earlier one. Other ranks may still be busy.
            TimeoutError: not every rank answered in time. The group is unusable from then on.
        """
        shared = ray.put(args)
        return await self._run(method, [shared] * self.size, timeout_s)

    async def call_each(self, method: str, args: Sequence[tuple[Any, ...]], *, timeout_s: float) -> list[Any]:
        """Run ``method(*args[rank])`` on every rank; otherwise as ``call``."""
        assert len(args) == self.size, f"{len(args)} argument tuples for the {self.size} ranks of {self.name}"
        return await self._run(method, args, timeout_s)

    async def build(self, target: str, args: Sequence[tuple[Any, ...]], *, own_device: bool, timeout_s: float) -> None:
        """Construct the group's class on every rank; part of ``RayCluster.workers``."""
        starting = [actor.__ray_call__.remote(_place) for actor in self._actors]
        places = await self._answers("start", starting, timeout_s)
        environments = rendezvous(places, own_device=own_device)
        building = [
            actor.build.remote(target, args[rank], environments[rank]) for rank, actor in enumerate(self._actors)
        ]
        await self._answers("__init__", building, timeout_s)

    def kill(self) -> None:
        """End every process of the group at once."""
        for actor in self._actors:
            ray.kill(actor)

    async def _run(self, method: str, args: Sequence[Any], timeout_s: float) -> list[Any]:
        if self._failure is not None:
            failure = copy.copy(self._failure)
            failure.add_note(f"{self.name}.{method} was not called: after this failure the group is unusable.")
            raise failure
        thread = {"concurrency_group": _SIDE} if method in self._side_methods else {}
        refs = [actor.run.options(**thread).remote(method, args[rank]) for rank, actor in enumerate(self._actors)]
        return await self._answers(method, refs, timeout_s)

    async def _answers(self, method: str, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """The ranks' answers; the first failure, or the deadline, ends the wait and the group."""
        tasks = [asyncio.ensure_future(self._answer(rank, method, ref)) for rank, ref in enumerate(refs)]
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            first = _failures(tasks)
            if first:
                await asyncio.wait(tasks, timeout=_BLAME_S)
            died = [failure for failure in _failures(tasks) if failure.died]
            failure = next(iter(died + first), None) or self._overdue(method, tasks, timeout_s)
            if failure is not None:
                self._failure = failure
                raise failure
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _answer(self, rank: int, method: str, ref: Any) -> Any:
        try:
            answer = await ref
        except ray.exceptions.RayActorError as error:
            raise self._failed(rank, method, _how_it_died(error), died=True) from None
        except ray.exceptions.OutOfMemoryError as error:  # the rest of its text is advice about Ray
            raise self._failed(rank, method, _one_line(error).partition(" OOM kill reason")[0], died=True) from None
        except ray.exceptions.RayTaskError as error:  # mostly a result that cannot be sent; its text is a traceback
            raise self._failed(rank, method, str(error).strip().splitlines()[-1]) from None
        except Exception as error:  # noqa: BLE001 - a supervised process: lost objects, a broken environment, no memory
            raise self._failed(rank, method, f"{type(error).__name__}: {_one_line(error)}") from None
        if isinstance(answer, Raised):
            raise self._failed(rank, method, answer.text)
        return answer

    def _failed(self, rank: int, method: str, cause: str, *, died: bool = False) -> WorkerFailed:
        log = self._log_files[rank]
        return WorkerFailed(self.name, rank, method, cause, log, last_lines(log, _LOG_LINES), died)

    def _overdue(self, method: str, tasks: Sequence[asyncio.Task[Any]], timeout_s: float) -> TimeoutError | None:
        answered = [rank for rank, task in enumerate(tasks) if task.done()]
        if len(answered) == self.size:
            return None
        ranks = f"ranks {', '.join(map(str, answered))} of {self.size} have" if answered else "no rank has"
        return TimeoutError(f"{self.name}.{method} took longer than {timeout_s:g} s; {ranks} answered")


def _configure_ray() -> None:
    """Settings that Ray reads from the environment only, for this process and those it starts."""
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",  # else `uv run` has the working directory uploaded to every worker
        RAY_prestart_worker_first_driver="0",  # every actor has its own environment, so idle workers fit none
    )
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # what it has to say is in our own errors


def _importing_megarl(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with this megarl first on the import path, of the rank and of processes it starts."""
    root = str(Path(megarl.__file__).parents[1])
    inherited = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, (root, inherited)))}


def _place(_: Shell) -> Place:
    """Runs in the actor."""
    return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free_port())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _how_it_died(error: Exception) -> str:
    """Ray's reason, without the advice it repeats every time."""
    detail = re.search(r"Worker exit type: (.*?)(?: Some common causes.*)?$", _one_line(error))
    return detail.group(1) if detail else _one_line(error)


def _failures(tasks: Sequence[asyncio.Task[Any]]) -> list[WorkerFailed]:
    errors = [task.exception() for task in tasks if task.done()]
    return [error for error in errors if isinstance(error, WorkerFailed)]
