"""One rank of one vLLM engine: what an engine process does when the driver calls it.

The engine core, the scheduler and the model all live in this process; vLLM starts no process of its own. With tensor
parallelism every rank runs the same engine and must get the same calls in the same order. vLLM is imported in
``setup``, after the environment it reads has been set, so importing this file costs nothing.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import RolloutConfig
from megarl.rollout.vllm_weights import LiveModel, Undo, loaded_shapes
from megarl.types import EngineStatus, FinishReason, GenerateRequest, Turn
from megarl.weights.transports.shm import DTYPES, FOLDER, ShmReader, StagingArea

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

    ``verify_staged`` may run in another thread while ``generate`` runs; all other methods wait for each other.
    """

    def __init__(self, config: RolloutConfig, model: Path, initial_version: int | None = None) -> None:
        """``model`` is a Hugging Face folder.

        Its weights are loaded and served as ``initial_version``; with None only its config is read, and nothing can be
        sampled until weights are installed.
        """
        self._config, self._model, self._initial_version = config, model, initial_version
        self._stop_ids = stop_token_ids(model)
        self._busy = threading.Lock()
        self._paused = False
        self._version, self._content = NO_VERSION, ""
        self._verified: tuple[int, str] | None = None
        self._undo: tuple[Undo, int, str] | None = None
        self._num_requests = 0
        self._area: StagingArea | None = None

    # --- life ------------------------------------------------------------------------------------------------------

    def free_endpoint(self) -> str:
        """A free ``host:port`` for the ranks of one engine to meet at; they share a machine."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}"

    def setup(self, tp_rank: int, endpoint: str) -> str:
        """Start the engine together with its other ranks, which meet at ``endpoint``; says what was started."""
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self._tp_rank, self._port = tp_rank, endpoint.rpartition(":")[2]
        self._engine = _start_engine(self._config, self._model, tp_rank, endpoint, dummy=self._initial_version is None)
        module = self._engine.model_executor.driver_worker.model_runner.model
        self._live = LiveModel(module, loaded_shapes(module))
        if self._initial_version is not None:
            self._serve(self._initial_version)
        count = sum(math.prod(shape) for shape in loaded_shapes(module).values())
        return f"tp rank {tp_rank}: {type(module).__name__}, {count:,} elements, {self._config.dtype}"

    def close(self) -> None:
        """Stop the engine and remove the shared memory its ranks talked through."""
        with self._busy:
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
        return [_turn(request, output) for request, output in zip(requests, outputs, strict=True)]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probability (temperature 1) of every token but the first; from tp rank 0, None elsewhere."""
        from vllm import SamplingParams

        params = [SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False) for _ in sequences]
        outputs = self._run(sequences, params)
        if self._tp_rank != 0:
            return None
        return [_prompt_logprobs(ids, output) for ids, output in zip(sequences, outputs, strict=True)]

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

    def _run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """The finished outputs, in the order of ``prompts``."""
        from vllm.inputs.engine import tokens_input

        with self._busy:
            self._require_serving()
            self._engine.reset_prefix_cache()
            first = self._num_requests
            for prompt, param in zip(prompts, params, strict=True):
                self._engine.add_request(str(self._num_requests), tokens_input(list(prompt)), param)
                self._num_requests += 1
            finished: dict[str, Any] = {}
            while self._engine.has_unfinished_requests():
                finished |= {output.request_id: output for output in self._engine.step() if output.finished}
        return [finished[str(first + number)] for number in range(len(prompts))]

    def _require_serving(self) -> None:
        if self._paused:
            raise RuntimeError("the engine is paused for new weights; call resume first")
        if self._version == NO_VERSION:
            raise RuntimeError("the engine has no weights yet: attach, install and resume a version first")

    # --- weights ---------------------------------------------------------------------------------------------------

    def attach(self, area: StagingArea) -> None:
        """Map the shared memory that new weights will come through.

        Raises:
            WeightMismatch: the plan's parameters are not this model's.
            StagingError: the segments are missing or of another plan.
        """
        self._live.require_match(area.plan.shapes[self._tp_rank], DTYPES[area.dtype])
        self._reader = ShmReader(area, self._tp_rank)
        self._area = area

    def verify_staged(self, version: int) -> EngineStatus:
        """Check this rank's staged weights against the trainer's checksums; the status tells of ``version``."""

        def verify() -> None:
            self._verified = None
            self._verified = (version, self._reader.verify(version))

        error = _error_of(verify)
        return self._status(version, self._verified[1] if self._verified else "", error)

    def pause(self) -> None:
        """Refuse requests from now on; returns when none is running."""
        with self._busy:
            self._paused = True

    def install(self, version: int) -> EngineStatus:
        """Put the verified weights in place. On an error this rank is as it was, and the status says so."""
        with self._busy:
            error = _error_of(lambda: self._install(version))
            return self._status(self._version, self._content, error)

    def _install(self, version: int) -> None:
        if not self._paused:
            raise RuntimeError("the engine must be paused before weights are installed")
        if self._verified is None or self._verified[0] != version:
            raise RuntimeError(f"version {version} was not verified; call verify_staged({version}) first")
        if self._undo is not None:
            raise RuntimeError("an install is neither resumed nor rolled back yet")
        self._reader.require_version(version)
        staged = self._reader.parameters()
        undo = self._live.install(staged)
        try:
            self._live.probe(staged, turn=version)
        except BaseException:
            undo()
            raise
        self._undo = (undo, self._version, self._content)
        self._version, self._content = self._verified

    def rollback(self) -> EngineStatus:
        """Undo the last ``install`` bit for bit; nothing to do where it failed or was never called."""
        with self._busy:
            error = _error_of(self._rollback)
            return self._status(self._version, self._content, error)

    def _rollback(self) -> None:
        if self._undo is not None:
            undo, self._version, self._content = self._undo
            undo()
            self._undo = None
        if self._version == NO_VERSION:
            raise RuntimeError("there is no earlier version to serve; the engine stays paused")

    def resume(self, version: int) -> None:
        """Serve ``version`` from now on. Raises RuntimeError when another version is in place."""
        with self._busy:
            if version != self._version:
                raise RuntimeError(f"cannot serve version {version}: version {self._version} is in place")
            self._undo = None
            self._serve(version)

    def _serve(self, version: int) -> None:
        self._engine.reset_prefix_cache()
        self._engine.set_weight_version(str(version))
        self._version, self._paused = version, False

    def _status(self, version: int, content: str, error: str) -> EngineStatus:
        digest = self._area.plan.digest if self._area else ""
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


def _start_engine(config: RolloutConfig, model: Path, tp_rank: int, endpoint: str, *, dummy: bool) -> LLMEngine:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    from megarl.rollout.vllm_executor import RANK_KEY, RENDEZVOUS_KEY, OneRankExecutor

    if not current_platform.is_cpu():
        raise RuntimeError(
            f"installing weights into vLLM on {current_platform.device_name} is not supported yet, only on CPU"
        )
    args = EngineArgs(
        model=str(model),
        dtype=str(DTYPES[config.dtype]).removeprefix("torch."),
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
    versions = [int(span.version) for span in completion.weight_versions or []]
    reason: FinishReason = completion.finish_reason if completion.finish_reason in ("stop", "length") else "abort"
    if len(logprobs) != len(ids) or not ids or not all(map(math.isfinite, logprobs)) or not versions:
        ids, logprobs, reason = (), (), "abort"
    return Turn(
        prompt_ids=request.prompt_ids,
        completion_ids=ids,
        rollout_logprobs=logprobs,
        version=min(versions, default=NO_VERSION),
        finish_reason=reason,
    )


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
