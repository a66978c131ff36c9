from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from megarl.weights.engine_layout import EngineLayout, engine_params
from megarl.weights.hf_files import ShardReader, check_folder, read_headers
from megarl.weights.megatron_layout import MegatronLayout, megatron_params
from megarl.weights.spec import ModelSpec
from tests.weights.models import CONFIGS, numbered_weights
from tests.weights.sharders import engine_shards, megatron_shards

Weights = dict[str, np.ndarray]


def floats(config: dict[str, Any]) -> Weights:
    """Numbered weights in fp32, which holds them exactly."""
    return {name: array.astype(np.float32) for name, array in numbered_weights(ModelSpec.from_hf(config)).items()}


def folder_of(path: Path, config: dict[str, Any], weights: Weights, num_files: int = 1) -> Path:
    """A model folder with ``weights``, in one file or in several with an index."""
    (path / "config.json").write_text(json.dumps(config))
    if num_files == 1:
        save_file(weights, path / "model.safetensors")
        return path
    weight_map = {}
    for number in range(num_files):
        names = sorted(weights)[number::num_files]
        save_file({name: weights[name] for name in names}, path / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"part-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("model", CONFIGS)
def test_every_trainer_rank_reads_its_own_shards(tmp_path: Path, model: str, num_files: int) -> None:
    config = CONFIGS[model]
    weights = floats(config)
    folder = folder_of(tmp_path, config, weights, num_files)
    spec = ModelSpec.from_folder(folder)
    check_folder(folder, spec)
    layout = MegatronLayout(tp=2, pp=2, ep=2 if spec.experts else 1, world_size=4)
    with ShardReader(folder) as reader:
        for rank, wanted in enumerate(megatron_shards(config, weights, layout, "local")):
            for name, shard in megatron_params(spec, layout, rank).items():
                np.testing.assert_array_equal(reader.read(shard, torch.float32).numpy(), wanted[name], err_msg=name)


def test_stacked_experts_are_read_too(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"]
    weights = floats(config)
    spec = ModelSpec.from_hf(config)
    with ShardReader(folder_of(tmp_path, config, weights)) as reader:
        for rank, wanted in enumerate(engine_shards(config, weights, 2, expert_parallel=False)):
            for name, shard in engine_params(spec, EngineLayout(2), rank).items():
                np.testing.assert_array_equal(reader.read(shard, torch.float32).numpy(), wanted[name], err_msg=name)


def test_bf16_files_are_read_bit_for_bit(tmp_path: Path) -> None:
    config = CONFIGS["qwen2"]
    spec = ModelSpec.from_hf(config)
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(s, generator=generator).bfloat16() for n, s in spec.hf_tensors().items()}
    save_torch(weights, tmp_path / "model.safetensors")
    check_folder(tmp_path, spec)
    shard = megatron_params(spec, MegatronLayout(tp=2, world_size=2), 1)["decoder.layers.0.mlp.linear_fc2.weight"]
    with ShardReader(tmp_path) as reader:
        part = reader.read(shard, torch.bfloat16)
        assert torch.equal(part, weights["model.layers.0.mlp.down_proj.weight"][:, 8:])
        assert torch.equal(reader.read(shard, torch.float32), part.float())


def test_the_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    folder_of(tmp_path, config, floats(config), num_files=3)
    folder_of(tmp_path, config, floats(config))
    assert {header.file.name for header in read_headers(tmp_path).values()} == {"model.safetensors"}


@pytest.mark.parametrize(
    ("model", "name"),
    [("qwen2-tied", "lm_head.weight"), ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq")],
)
def test_tensors_that_transformers_ignores_are_allowed(tmp_path: Path, model: str, name: str) -> None:
    config = CONFIGS[model]
    folder = folder_of(tmp_path, config, floats(config) | {name: np.zeros((75, 24), np.float32)})
    check_folder(folder, ModelSpec.from_hf(config))


def without(*names: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: array for name, array in weights.items() if name not in names}


NORMS = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("lm_head.weight"), r"lm_head.weight is missing; copy the folder again"),
        (without(*NORMS), r"layers.2.input_layernorm.weight and 1 more are missing"),
        (
            lambda w: w | {"model.layers.9.x": np.zeros(1, np.float32)},
            r"model.layers.9.x is unknown; take the config.json",
        ),
        (lambda w: w | {"model.norm.weight": np.zeros(25, np.float32)}, r"model.norm.weight .*\[24\], not \[25\]"),
        (lambda w: w | {"model.norm.weight": np.zeros(24, np.int8)}, r"one of F32, BF16, F16, not I8; dequantise"),
    ],
)
def test_a_folder_that_is_not_the_model_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    config = CONFIGS["llama"]
    folder = folder_of(tmp_path, config, change(floats(config)))
    with pytest.raises(ValueError, match=message):
        check_folder(folder, ModelSpec.from_hf(config))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def cut_in_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def broken_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 16) + b'{"a": {"dtype":1')


def foreign_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 8) + b'{"a": 1}')


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, "bytes long by its header"),
        (cut_in_header, "cut off or something else"),
        (pointer, "cut off or something else"),
        (empty, "cut off or something else"),
        (broken_header, "must start with a safetensors header"),
        (foreign_header, "must start with a safetensors header"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    config = CONFIGS["llama"]
    folder = folder_of(tmp_path, config, floats(config))
    damage(folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        check_folder(folder, ModelSpec.from_hf(config))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold model.safetensors or model.safetensors.index.json"):
        read_headers(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 1}'])
def test_a_damaged_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="must be a safetensors index"):
        read_headers(tmp_path)


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    folder = folder_of(tmp_path, config, floats(config), num_files=3)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"part-1.safetensors is missing"):
        read_headers(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    weights = floats(config)
    folder = folder_of(tmp_path, config, weights, num_files=2)
    save_file(weights, folder / "part-1.safetensors")
    with pytest.raises(ValueError, match="must be in one file"):
        read_headers(folder)


@pytest.mark.timeout(2)
def test_checking_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 20 GB of holes, checked without torch; reading it would run into the time limit."""
    config = CONFIGS["llama"] | {"vocab_size": 200_000_000, "tie_word_embeddings": True}
    spec = ModelSpec.from_hf(config)
    entries, end = {}, 0
    for name, shape in spec.hf_tensors().items():
        start, end = end, end + 4 * int(np.prod(shape))
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    monkeypatch.setitem(sys.modules, "torch", None)
    check_folder(tmp_path, spec)


@pytest.mark.slow
@pytest.mark.parametrize("model", CONFIGS)
def test_what_transformers_saves_is_accepted_and_read_back(tmp_path: Path, model: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(CONFIGS[model])
    family = config.pop("model_type")
    saved = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    saved.save_pretrained(tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    assert spec == ModelSpec.from_hf(CONFIGS[model])
    check_folder(tmp_path, spec)
    shard = megatron_params(spec, MegatronLayout(), 0)["embedding.word_embeddings.weight"]
    with ShardReader(tmp_path) as reader:
        assert torch.equal(reader.read(shard, torch.float32), saved.get_input_embeddings().weight)
