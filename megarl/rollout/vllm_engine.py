"""One rank of one vLLM engine: what an engine process does when the driver calls it.

The engine core, the scheduler and the model all live in this process; vLLM starts no process of its own. With tensor
parallelism every rank runs the same engine and must get the same calls in the same order. vLLM is imported in
``setup``, after the environment it reads has been set, so importing this file costs nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from megarl.config import RolloutConfig
from megarl.ports import free_port
from megarl.rollout import vllm_cpu
from megarl.rollout.gate import Gate, alone
from megarl.rollout.vllm_weights import LiveModel, Prepared, WeightMismatch, loaded_shapes
from megarl.types import EngineStatus, FinishReason, GenerateRequest, Turn
from megarl.weights.transports.shm import FOLDER
from megarl.weights.transports.transport import DTYPES, Cargo, Transport

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core stays in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are given from outside, by OMP_NUM_THREADS
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first logprobs compile a C++ kernel for 10 s
}
"""What vLLM reads when it is imported; values set outside win."""

_BATCHED_TOKENS = 8192
"""Tokens of one engine step; more prompts wait for the next."""

NO_VERSION = -1
"""The version of an engine that was never given weights."""


class VllmWorker:
    """Holds this rank's shard of the model and its share of the KV cache.

    ``generate`` and ``score`` run in one thread, one list after the other; everything about weights may run in another
    at the same time.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model: Path,
        initial_version: int | None = None,
        interruptible: bool = False,
    ) -> None:
        """``model`` is a Hugging Face folder.

        Its weights are loaded and served as ``initial_version``; with None only its config is read, and nothing can be
        sampled until weights are installed. ``interruptible``: it may be paused between any two steps, for which the
        ranks of an engine have to talk before each.
        """
        self._config, self._model, self._initial_version = config, model, initial_version
        self._interruptible = interruptible
        self._stop_ids = stop_token_ids(model)
        self._version, self._content = NO_VERSION, ""
        self._received: tuple[int, str, Prepared] | None = None
        self._undo: tuple[Prepared, int, str] | None = None
        self._num_requests = 0
        self._cargo: Cargo | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    def free_endpoint(self) -> str:
        """A free ``host:port`` for the ranks of one engine to meet at; they share a machine."""
        return f"127.0.0.1:{free_port()}"

    def setup(self, tp_rank: int, endpoint: str) -> str:
        """Start the engine together with its other ranks, which meet at ``endpoint``; says what was started."""
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self._tp_rank, self._port = tp_rank, endpoint.rpartition(":")[2]
        agree = _agree_with_ranks if self._interruptible and self._config.tensor_parallel > 1 else alone
        self._gate = Gate(agree, self._config.timeout_s)
        self._engine = _start_engine(self._config, self._model, tp_rank, endpoint, dummy=self._initial_version is None)
        module = self._engine.model_executor.driver_worker.model_runner.model
        self._live = LiveModel(module, loaded_shapes(module))
        if self._initial_version is not None:
            self._serve(self._initial_version)
        count = sum(math.prod(shape) for shape in loaded_shapes(module).values())
        return f"tp rank {tp_rank}: {type(module).__name__}, {count:,} elements, {self._config.dtype}"

    def close(self) -> None:
        """Stop the engine and remove the shared memory its ranks talked through."""
        with self._gate.held():
            self._engine.engine_core.shutdown()
        for path in FOLDER.glob(f"{self._port}-*-cpushm_*"):
            path.unlink(missing_ok=True)

    # --- sampling --------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Turn] | None:
        """One turn per request, in order; from tp rank 0, None elsewhere.

        The prefix cache starts empty and all requests are enqueued before the first step, so the same list gives the
        same turns. A turn with invalid log-probabilities comes back empty, with finish reason ``abort``.
        """
        prompts = [request.prompt_ids for request in requests]
        outputs = self._run(prompts, [self._sampling(request) for request in requests])
        if self._tp_rank != 0:
            return None
        return [
            _turn(request, output) if output else _aborted(request, self._version)
            for request, output in zip(requests, outputs, strict=True)
        ]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probability (temperature 1) of every token but the first; from tp rank 0, None elsewhere."""
        from vllm import SamplingParams

        params = [SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False) for _ in sequences]
        outputs = self._run(sequences, params)
        if self._tp_rank != 0:
            return None
        if None in outputs:
            raise RuntimeError("the engine was paused with abort while it scored; score again")
        return [_prompt_logprobs(ids, output) for ids, output in zip(sequences, outputs, strict=True) if output]

    def _sampling(self, request: GenerateRequest) -> SamplingParams:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=self._stop_ids,
            logprobs=0,
            detokenize=False,
        )

    def _run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[RequestOutput | None]:
        """The finished outputs, in the order of ``prompts``; None for those that were aborted."""
        from vllm.inputs.engine import tokens_input

        with self._gate.beginning():
            self._require_serving()
            self._engine.reset_prefix_cache()
            ids = [str(self._num_requests + number) for number in range(len(prompts))]
            self._num_requests += len(prompts)
            for request_id, prompt, param in zip(ids, prompts, params, strict=True):
                self._engine.add_request(request_id, tokens_input(list(prompt)), param)
        finished: dict[str, RequestOutput] = {}
        while len(finished) < len(ids):
            with self._gate.passing() as going_on:
                if not going_on:
                    self._engine.abort_request([request_id for request_id in ids if request_id not in finished])
                    break
                outputs = cast("list[RequestOutput]", self._engine.step())
                finished |= {output.request_id: output for output in outputs if output.finished}
        return [finished.get(request_id) for request_id in ids]

    def _require_serving(self) -> None:
        if self._version == NO_VERSION:
            raise RuntimeError("the engine has no weights yet: attach, install and resume a version first")

    # --- weights ---------------------------------------------------------------------------------------------------

    def attach(self, transport: Transport, replica: int) -> None:
        """Make this rank's side of what new weights come through.

        Raises:
            WeightMismatch: the plan's parameters or experts are not this model's.
            StagingError: what they come through is missing or of another plan.
        """
        cargo = transport.cargo
        if self._tp_rank >= len(cargo.plan.shapes):
            raise WeightMismatch(f"the plan has {len(cargo.plan.shapes)} engine ranks, this is rank {self._tp_rank}")
        self._live.require_match(cargo.expected(self._tp_rank))
        self._live.require_experts(_planned_experts(cargo, self._tp_rank))
        self._reader = transport.reader(replica, self._tp_rank)
        self._cargo = cargo

    def receive(self, version: int, timeout_s: float | None = None) -> EngineStatus:
        """Take this rank's new weights, check them and pack them; the status tells of ``version``.

        They are not served yet, and generation goes on meanwhile.
        """

        def receive() -> None:
            self._received = None
            digest = self._reader.receive(version, self._config.timeout_s if timeout_s is None else timeout_s)
            self._received = (version, digest, self._live.prepare(self._reader.parameters(), turn=version))

        error = _error_of(receive)
        return self._status(version, self._received[1] if self._received else "", error)

    def pause(self, abort: bool = False) -> None:
        """Make no step from now on; returns when none is under way. With ``abort`` running requests end here."""
        self._gate.close(abort=abort)

    def install(self, version: int) -> EngineStatus:
        """Put the received weights in place. On an error this rank is as it was, and the status says so."""
        with self._gate.held():
            error = _error_of(lambda: self._install(version))
            return self._status(self._version, self._content, error)

    def _install(self, version: int) -> None:
        if self._gate.is_open:
            raise RuntimeError("the engine must be paused before weights are installed")
        if self._received is None or self._received[0] != version:
            raise RuntimeError(f"version {version} was not received; call receive({version}) first")
        if self._undo is not None:
            raise RuntimeError("an install is neither resumed nor rolled back yet")
        _, content, prepared = self._received
        prepared.exchange()
        self._undo = (prepared, self._version, self._content)
        self._version, self._content, self._received = version, content, None

    def rollback(self) -> EngineStatus:
        """Undo the last ``install`` bit for bit; nothing to do where it failed or was never called."""
        with self._gate.held():
            error = _error_of(self._rollback)
            return self._status(self._version, self._content, error)

    def _rollback(self) -> None:
        if self._undo is not None:
            prepared, self._version, self._content = self._undo
            prepared.exchange()
            self._undo = None
        if self._version == NO_VERSION:
            raise RuntimeError("there is no earlier version to serve; the engine stays paused")

    def resume(self, version: int) -> None:
        """Serve ``version`` from now on. Raises RuntimeError when another version is in place."""
        with self._gate.held():
            if version != self._version:
                raise RuntimeError(f"cannot serve version {version}: version {self._version} is in place")
            self._undo = None
            self._serve(version)

    def _serve(self, version: int) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=True)  # whose caches are of the old weights
        self._engine.set_weight_version(str(version))
        self._version = version
        self._gate.open()

    def _status(self, version: int, content: str, error: str) -> EngineStatus:
        digest = self._cargo.plan.digest if self._cargo else ""
        return EngineStatus(version=version, plan_digest=digest, content_digest=content, error=error)


def _error_of(action: Callable[[], None]) -> str:
    """Run ``action``; the text of what it raised, or nothing.

    A rank's failure travels as data, so that the driver hears of all ranks before it decides.
    """
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the boundary of a supervised process
        return f"{type(error).__name__}: {error}"
    return ""


def _agree_with_ranks(pauses: int, aborts: int) -> tuple[int, int]:
    """The largest of both over the ranks of this engine."""
    from vllm.distributed import get_tp_group

    both = torch.tensor([pauses, aborts])
    torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=get_tp_group().cpu_group)
    return int(both[0]), int(both[1])


def _planned_experts(cargo: Cargo, dst_rank: int) -> dict[str, list[int]]:
    """{module of experts: numbers of the experts that the plan stacks in it, in order}."""
    experts: dict[str, dict[int, int]] = {}
    for op in cargo.plan.for_destination(dst_rank):
        module, _, leaf = op.dst_param.rpartition(".")
        if leaf == "w2_weight":
            rows = cargo.plan.shapes[dst_rank][op.dst_param][1]
            number = int(op.hf_name.partition(".experts.")[2].partition(".")[0])
            experts.setdefault(module, {})[op.dst_rect.row0 // rows] = number
    return {module: [number for _, number in sorted(places.items())] for module, places in experts.items()}


def _start_engine(config: RolloutConfig, model: Path, tp_rank: int, endpoint: str, *, dummy: bool) -> LLMEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    from megarl.rollout.vllm_executor import RANK_KEY, RENDEZVOUS_KEY, OneRankExecutor

    if not current_platform.is_cpu():
        raise RuntimeError(
            f"installing weights into vLLM on {current_platform.device_name} is not supported yet, only on CPU"
        )
    vllm_cpu.prepare()
    args = EngineArgs(
        model=str(model),
        dtype=str(DTYPES[config.dtype]).removeprefix("torch."),
        enable_expert_parallel=config.expert_parallel,
        expert_placement_strategy=config.expert_placement,
        load_format="dummy" if dummy else "auto",
        skip_tokenizer_init=True,
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend=OneRankExecutor,
        additional_config={RENDEZVOUS_KEY: endpoint, RANK_KEY: tp_rank},
        enforce_eager=True,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) // config.tensor_parallel,
        enable_prefix_caching=True,
        enable_chunked_prefill=False,  # a seeded request cut in two would rewind its generator: CPU generators cannot
        max_num_batched_tokens=max(config.max_model_len, _BATCHED_TOKENS),
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    return LLMEngine.from_engine_args(args)


def stop_token_ids(model: Path) -> list[int]:
    """The model's end-of-sequence ids: generation_config.json's, else config.json's, else none."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def _turn(request: GenerateRequest, output: RequestOutput) -> Turn:
    completion = output.outputs[0]
    ids = tuple(completion.token_ids)
    logprobs = tuple(_sampled_logprobs(ids, completion.logprobs or []))
    spans = tuple((int(span.version), span.end - span.start) for span in completion.weight_versions or [])
    reason: FinishReason = completion.finish_reason if completion.finish_reason in ("stop", "length") else "abort"
    if len(logprobs) != len(ids) or not ids or not all(map(math.isfinite, logprobs)) or not spans:
        ids, logprobs, reason = (), (), "abort"
    return Turn(
        prompt_ids=request.prompt_ids,
        completion_ids=ids,
        rollout_logprobs=logprobs,
        version=min((version for version, _ in spans), default=NO_VERSION),
        finish_reason=reason,
        version_spans=spans if len(spans) > 1 and ids else (),
    )


def _aborted(request: GenerateRequest, version: int) -> Turn:
    return Turn(request.prompt_ids, (), (), version, "abort")


def _sampled_logprobs(ids: Sequence[int], rows: Sequence[Any]) -> Iterator[float]:
    """The log-probability of each sampled id, as far as rows go and have it."""
    for token, row in zip(ids, rows, strict=False):
        if token in row:
            yield float(row[token].logprob)


def _prompt_logprobs(ids: Sequence[int], output: RequestOutput) -> list[float]:
    rows = output.prompt_logprobs
    assert rows is not None, "vLLM gave no prompt log-probabilities"
    assert len(rows) == len(ids), f"{len(rows)} prompt log-probabilities for {len(ids)} ids"
    return [float(row[token].logprob) for token, row in zip(ids[1:], rows[1:], strict=True)]
