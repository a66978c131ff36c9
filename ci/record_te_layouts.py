"""Records what Transformer Engine's layers call their parameters and how large each rank's are, without a GPU.

    python -m ci.record_te_layouts                 every model of tests/weights/models.py
    python -m ci.record_te_layouts qwen3_moe       this one

To be run in the repository root. On GPUs the trainer builds Megatron-Core's GPTModel with Transformer Engine's layer
spec, and ``megatron_params(..., names="te")`` says from the outside what such a model holds. This script builds the
real one, through the trainer's own ``build_model``, and writes names and shapes of all ranks of several layouts to
tests/weights/golden/te-<model>.json, which tests/weights/test_te_golden.py compares.

How: ``megarl.trainer.cpu`` keeps every tensor in host memory, as it does for training on CPUs; while a model is built,
torch speaks of a GPU, so that the trainer chooses Transformer Engine and its modules do not refuse; weights are never
initialised; the process is one rank after the other of torch's fake process group, in which no collective moves
anything. A forward pass would need the GPU.

Needed: a CUDA build of torch, megatron-core, and transformer-engine with its torch extension, in an environment
of their own (the one of ci/setup.sh has a CPU build of torch). Where there is no wheel of transformer-engine-torch, it
builds from its source distribution with a C++ compiler and the header files of torch's own nvidia packages.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config import ParallelConfig, TrainerConfig
from megarl.trainer import cpu
from megarl.trainer.settings import layout_of
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.spec import ModelSpec
from tests.weights.models import CONFIGS

cpu.prepare()  # before Megatron-Core is imported

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megarl.trainer import model as trainer_model  # noqa: E402

Sizes = dict[str, Any]
"""Arguments of MegatronLayout and ParallelConfig. Example: ``{"tp": 2, "ep": 2, "world_size": 2}``"""

Shapes = dict[str, list[int]]
"""Parameter or persistent buffer -> shape. Example: ``{"decoder.final_layernorm.weight": [24]}``"""

_GOLDEN = Path("tests/weights/golden")
_PACKAGES = ("megatron-core", "transformer-engine")
_HOPPER = (9, 0)


def main() -> None:
    """Build, look, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CONFIGS), help="keys of CONFIGS in tests/weights/models.py")
    parser.add_argument("--output", type=Path, default=_GOLDEN, help="folder to write to")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for model in args.models:
        path = args.output / f"te-{model}.json"
        path.write_text(_as_text(recording(CONFIGS[model])))
        print(f"wrote {path}")


def recording(config: dict[str, Any]) -> dict[str, Any]:
    """All layouts of one model, with what they were made from; ranks that hold the same share an entry."""
    spec = ModelSpec.from_hf(config)
    recorded = []
    for sizes in layouts(spec):
        ranks = [rank_shapes(spec, sizes, rank) for rank in range(sizes.get("world_size", 1))]
        recorded.append({"sizes": sizes, "shares": _shares(ranks)})
    return {"versions": {name: version(name) for name in _PACKAGES}, "config": config, "layouts": recorded}


def layouts(spec: ModelSpec) -> list[Sizes]:
    """One layout for every way in which a rank's names or shapes depend on the parallel sizes."""
    sizes: list[Sizes] = [
        {},
        {"tp": 2, "world_size": 2},
        {"pp": 2, "world_size": 2},
        {"pp": 2, "vpp": 2, "world_size": 2},
    ]
    more_than_groups = 2 * spec.kv_heads
    if spec.latent is None and spec.heads % more_than_groups == 0:
        sizes.append({"tp": more_than_groups, "world_size": more_than_groups})
    if spec.experts:
        sizes += [
            {"tp": 2, "ep": 2, "world_size": 2},
            {"tp": 2, "etp": 2, "world_size": 2},
            {"tp": 2, "ep": 2, "etp": 2, "world_size": 4},
        ]
    return sizes


def rank_shapes(spec: ModelSpec, sizes: Sizes, rank: int) -> Shapes:
    """What ``rank`` holds when the trainer builds its model on GPUs, sorted by name."""
    trainer = TrainerConfig(model=Path(), parallel=ParallelConfig(**sizes))
    layout = layout_of(trainer.parallel)
    assert layout == MegatronLayout(**sizes), layout  # the test knows the latter only
    with _gpu_pretended(), _one_of_many_ranks(trainer.parallel, rank):
        tensors = trainer_model.live_tensors(trainer_model.build_model(spec, trainer, layout))
    return {name: list(tensors[name].shape) for name in sorted(tensors)}


@contextmanager
def _one_of_many_ranks(sizes: ParallelConfig, rank: int) -> Iterator[None]:
    """Be ``rank`` of as many as ``sizes`` asks for, with Megatron's process groups."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=sizes.world_size, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        create_gloo_process_groups=False,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextmanager
def _gpu_pretended() -> Iterator[None]:
    """Have trainer and modules believe in a GPU."""
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: _HOPPER,
        "get_device_properties": lambda device=None: SimpleNamespace(
            major=_HOPPER[0], minor=_HOPPER[1], multi_processor_count=132
        ),
    }
    with ExitStack() as patches:
        for name, stand_in in stand_ins.items():
            patches.enter_context(patch.object(torch.cuda, name, stand_in))
        patches.enter_context(patch.object(trainer_model, "transformer_config", _config_for_host_memory))
        # the wrapper's gradient buffers are of no interest, and would be on the GPU
        patches.enter_context(patch.object(trainer_model, "DistributedDataParallel", lambda config, ddp, chunk: chunk))
        yield


def _config_for_host_memory(
    spec: ModelSpec, trainer: TrainerConfig, build: Any = trainer_model.transformer_config
) -> TransformerConfig:
    config: TransformerConfig = build(spec, trainer)
    config.use_cpu_initialization = True
    return config


def _shares(ranks: Sequence[Shapes]) -> list[dict[str, Any]]:
    """The different ones of ``ranks``, each with the numbers of all ranks that hold it."""
    shares: list[dict[str, Any]] = []
    for rank, tensors in enumerate(ranks):
        same = [share for share in shares if share["tensors"] == tensors]
        if same:
            same[0]["ranks"].append(rank)
        else:
            shares.append({"ranks": [rank], "tensors": tensors})
    return shares


def _as_text(golden: dict[str, Any]) -> str:
    """JSON with one tensor a line, so that a difference reads as one."""
    text = json.dumps(golden, indent=1)
    return re.sub(r"\[[\d\s,]+\]", lambda numbers: json.dumps(json.loads(numbers[0])), text) + "\n"


if __name__ == "__main__":
    main()
