from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.weights.export import exported_dtypes, owned_tiles, write_tiles
from megarl.weights.hf_files import ShardReader, check_folder
from megarl.weights.megatron_layout import MegatronLayout, Names, megatron_params
from megarl.weights.spec import ModelSpec
from megarl.weights.tensor_files import create_files, plan_files
from tests.trainer.families import FAMILIES, MOE_FAMILIES, VOCAB, logits_of, write_model

LAYOUTS = {
    "one rank": MegatronLayout(),
    "tp 2 pp 2": MegatronLayout(tp=2, pp=2, world_size=4),
    "dp 2": MegatronLayout(world_size=2),
    "tp 2 ep 2": MegatronLayout(tp=2, ep=2, world_size=2),
    "pp 2 ep 2": MegatronLayout(pp=2, ep=2, world_size=4),
    "tp 2 etp 2": MegatronLayout(tp=2, etp=2, world_size=2),
    "tp 2 ep 2, two replicas of both": MegatronLayout(tp=2, ep=2, world_size=4),
    "tp 2, experts on every rank": MegatronLayout(tp=2, world_size=4),
}


def _export(
    source: Path, folder: Path, layout: MegatronLayout, *, dtype: str = "F32", names: Names = "local", **more: int
) -> int:
    """Import ``source`` into fake shards of ``layout`` and export them; bytes written by all ranks."""
    spec = ModelSpec.from_folder(source)
    plan = plan_files({name: (shape, dtype) for name, shape in spec.hf_tensors().items()}, **more)
    folder.mkdir()
    create_files(folder, plan)
    written = 0
    with ShardReader(source) as reader:
        for rank in range(layout.world_size):
            shards = megatron_params(spec, layout, rank, names)
            params = {name: reader.read(shard, torch.float32) for name, shard in shards.items()}
            written += write_tiles(folder, plan, owned_tiles(spec, layout, rank, names), params)
    return written


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_bit_for_bit_what_was_imported_in_every_layout(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path / "source")
    spec = ModelSpec.from_folder(tmp_path / "source")
    original = load_file(tmp_path / "source/model.safetensors")
    for name, layout in LAYOUTS.items():
        if (layout.ep > 1 or layout.etp > 1) and family not in MOE_FAMILIES:
            continue
        names: Names = "te" if layout.tp > 1 else "local"
        written = _export(tmp_path / "source", tmp_path / name, layout, names=names)
        check_folder(tmp_path / name, spec)
        exported = load_file(tmp_path / name / "model.safetensors")
        assert exported.keys() == spec.hf_tensors().keys()
        assert all(torch.equal(exported[key], original[key]) for key in exported), name
        assert written == 4 * spec.num_params  # every element once: no rank writes what another has written


def test_a_large_export_is_several_files_with_an_index(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path / "source")
    _export(tmp_path / "source", tmp_path / "many", LAYOUTS["tp 2 pp 2"], max_file_bytes=200_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size <= 210_000 for path in (tmp_path / "many").glob("*.safetensors"))
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    check_folder(tmp_path / "many", ModelSpec.from_folder(tmp_path / "source"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_transformers_loads_an_export_of_several_files(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = write_model(family, tmp_path / "source"), np.arange(40) * 7 % VOCAB
    _export(tmp_path / "source", tmp_path / "many", LAYOUTS["tp 2 pp 2"], max_file_bytes=200_000)
    shutil.copy(tmp_path / "source/config.json", tmp_path / "many")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype=torch.float32)
    assert np.array_equal(logits_of(exported, ids), logits_of(model, ids))


def test_a_bf16_export_of_fp32_shards_is_rounded_once(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "source")
    _export(tmp_path / "source", tmp_path / "bf16", LAYOUTS["tp 2 pp 2"], dtype="BF16")
    original = load_file(tmp_path / "source/model.safetensors")
    exported = load_file(tmp_path / "bf16/model.safetensors")
    assert all(torch.equal(exported[name], original[name].bfloat16()) for name in exported)


@pytest.mark.parametrize(("config", "expected"), [({"dtype": "bfloat16"}, "BF16"), ({"torch_dtype": "float32"}, "F32")])
def test_without_weights_the_number_format_is_the_configs(
    config: dict[str, str], expected: str, tmp_path: Path
) -> None:
    write_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    spec = ModelSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert set(exported_dtypes(tmp_path, spec).values()) == {expected}


@pytest.mark.parametrize(("config", "formats"), [("bfloat16", {"F32", "BF16"}), ("float32", {"F32"})])
def test_what_is_fp32_in_a_bf16_model_stays_so(config: str, formats: set[str], tmp_path: Path) -> None:
    write_model("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: torch.float32 if "correction_bias" in name else torch.bfloat16 for name in tensors}
    save_file({name: tensor.to(kept[name]) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    changed = json.loads((tmp_path / "config.json").read_text()) | {"dtype": config}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    found = exported_dtypes(tmp_path, ModelSpec.from_folder(tmp_path))
    assert set(found.values()) == formats
    assert all(dtype == "F32" for name, dtype in found.items() if "correction_bias" in name)
