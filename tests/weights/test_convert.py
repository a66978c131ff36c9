"""Hugging Face to Megatron shards and back: bit for bit, in any layout, after any interruption, in little memory."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.weights.convert import Converter, finish, prepare_export, prepare_import
from megarl.weights.megatron_files import MegatronFiles, open_reader
from megarl.weights.megatron_layout import MegatronLayout, Names, layout_from, megatron_params
from megarl.weights.spec import ModelSpec
from tests.trainer.families import FAMILIES, VOCAB, logits_of, write_model
from tests.weights.sharders import megatron_shards

LAYOUTS: dict[str, tuple[MegatronLayout, Names]] = {
    "one rank": (MegatronLayout(), "local"),
    "tp 2, pp 2, vpp 2": (MegatronLayout(tp=2, pp=2, vpp=2, world_size=4, vocab_multiple=16), "te"),
    "uneven stages, two replicas": (MegatronLayout(pp=2, world_size=4, first_stage_layers=1), "local"),
    "ep 2, etp 2": (MegatronLayout(ep=2, etp=2, world_size=4), "te"),
    "tp 4, fewer key heads than ranks": (MegatronLayout(tp=4, world_size=4), "local"),
}


def _import(source: Path, output: Path, layout: MegatronLayout, names: Names) -> MegatronFiles:
    job = prepare_import(source, MegatronFiles(output, ModelSpec.from_folder(source), layout, names))
    for rank in range(job.num_ranks):
        Converter().convert(job, rank)
    finish(job, output)
    return MegatronFiles.open(output)


def _export(source: MegatronFiles, output: Path) -> None:
    job = prepare_export(source, output)
    for rank in range(job.num_ranks):
        Converter().convert(job, rank)
    finish(job, output)


def _same(one: Path, other: Path) -> bool:
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def _mixed_formats(folder: Path) -> None:
    """bf16, but for the experts' bias, as DeepSeek and GLM are published."""
    tensors = load_file(folder / "model.safetensors")
    formats = {name: torch.float32 if "correction_bias" in name else torch.bfloat16 for name in tensors}
    save_file(
        {name: t.to(formats[name]) for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_way_there_and_back_is_bit_for_bit_in_every_layout(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path / "source")
    _mixed_formats(tmp_path / "source")
    spec = ModelSpec.from_folder(tmp_path / "source")
    for name, (layout, names) in LAYOUTS.items():
        if (not spec.experts and layout.etp > 1) or (spec.kv_heads % layout.tp and layout.tp % spec.kv_heads):
            continue
        shards = _import(tmp_path / "source", tmp_path / f"{name} shards", layout, names)
        shards.check()
        _export(shards, tmp_path / name)
        assert _same(tmp_path / "source", tmp_path / name), name


def test_every_rank_holds_what_an_independent_sharder_gives_it(tmp_path: Path) -> None:
    write_model("glm4_moe", tmp_path / "source")
    config = json.loads((tmp_path / "source/config.json").read_text())
    whole = {name: tensor.numpy() for name, tensor in load_file(tmp_path / "source/model.safetensors").items()}
    layout = MegatronLayout(tp=2, pp=2, ep=2, world_size=8)
    shards = _import(tmp_path / "source", tmp_path / "shards", layout, "te")
    for rank, expected in enumerate(megatron_shards(config, whole, layout, "te")):
        found = load_file(shards.file(rank))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name].numpy(), value, err_msg=name)


def test_a_trainer_of_another_layout_can_start_from_shards(tmp_path: Path) -> None:
    write_model("deepseek_v3", tmp_path / "source")
    _import(tmp_path / "source", tmp_path / "shards", MegatronLayout(tp=2, pp=2, ep=2, world_size=4), "te")
    spec, layout = ModelSpec.from_folder(tmp_path / "source"), MegatronLayout(tp=4, ep=4, world_size=4)
    with open_reader(tmp_path / "source") as files, open_reader(tmp_path / "shards") as shards:
        for rank in range(4):
            for name, shard in megatron_params(spec, layout, rank).items():
                assert torch.equal(files.read(shard, torch.float32), shards.read(shard, torch.float32)), name


def test_transformers_computes_the_same_with_what_was_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = write_model("qwen3_moe", tmp_path / "source"), np.arange(40) * 7 % VOCAB
    _export(_import(tmp_path / "source", tmp_path / "shards", *LAYOUTS["ep 2, etp 2"]), tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert np.array_equal(logits_of(exported, ids), logits_of(model, ids))


# --- interruptions ---------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from megarl.weights import convert
from megarl.weights.megatron_files import MegatronFiles
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.spec import ModelSpec

folder, left = Path(sys.argv[1]), int(sys.argv[2])
carry_out = convert.carry_out

def carry_out_some(copy, files):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    carry_out(copy, files)

convert.carry_out = carry_out_some
layout = MegatronLayout(tp=2, world_size=2)
spec = ModelSpec.from_folder(folder / "source")
job = convert.prepare_import(folder / "source", MegatronFiles(folder / "shards", spec, layout, "local"))
for rank in range(2):
    convert.Converter().convert(job, rank)
"""


def _killed_import(folder: Path, after: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(after)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_killed_conversion_goes_on_where_it_stopped(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "source")
    for after in (0, 7, 30):
        _killed_import(tmp_path, after)
        assert not (tmp_path / "shards").exists()
    layout = MegatronLayout(tp=2, world_size=2)
    output = MegatronFiles(tmp_path / "shards", ModelSpec.from_folder(tmp_path / "source"), layout, "local")
    job = prepare_import(tmp_path / "source", output)
    results = [Converter().convert(job, rank) for rank in range(2)]
    assert sum(one.resumed_bytes for one in results) > 0.5 * results[0].num_bytes
    finish(job, tmp_path / "shards")
    _export(MegatronFiles.open(tmp_path / "shards"), tmp_path / "out")
    assert _same(tmp_path / "source", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "shards", "source"]


def test_another_source_starts_anew(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "source")
    _killed_import(tmp_path, 7)
    write_model("llama", tmp_path / "source", seed=1)
    _export(
        _import(tmp_path / "source", tmp_path / "shards", MegatronLayout(tp=2, world_size=2), "local"), tmp_path / "out"
    )
    assert _same(tmp_path / "source", tmp_path / "out")


MEASURED = """
import sys
from pathlib import Path
from megarl.weights.convert import Converter, prepare_import
from megarl.weights.megatron_files import MegatronFiles
from megarl.weights.megatron_layout import MegatronLayout
from megarl.weights.spec import ModelSpec

folder = Path(sys.argv[1])
spec, layout = ModelSpec.from_folder(folder / "source"), MegatronLayout(tp=2, world_size=2)
output = MegatronFiles(folder / "shards", spec, layout, "te")
job = prepare_import(folder / "source", output)
print(Converter().convert(job, 0).peak_bytes)
"""


def test_a_rank_needs_little_memory_however_large_its_shard_is(tmp_path: Path) -> None:
    """A shard of 210 MB, of a file that is all holes."""
    from megarl.weights.tensor_files import create_files, plan_files

    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 8192,
        "vocab_size": 20000,
        "max_position_embeddings": 128,
    }
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_folder(tmp_path / "source")
    create_files(tmp_path / "source", plan_files({name: (shape, "BF16") for name, shape in spec.hf_tensors().items()}))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) < 200 * 2**20  # the interpreter, its libraries and one block of rows
    shutil.rmtree(tmp_path)


# --- mistakes --------------------------------------------------------------------------------------------------------


def _without(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _with_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.side_proj.weight"] = torch.zeros(2)


def _reshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(3)


def _as_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


def _in_two_formats(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].bfloat16()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without, r"up_proj.weight is missing"),
        (_with_more, r"side_proj.weight is unknown"),
        (_reshaped, r"model.norm.weight .* must have the shape"),
        (_as_integers, r"model.norm.weight .* must be one of F32"),
        (_in_two_formats, r"k_proj.weight.* must have one number format"),
    ],
)
def test_a_folder_that_is_not_the_model_is_refused_before_anything_is_written(spoil, message, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "source")
    tensors = load_file(tmp_path / "source/model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "source/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        _import(tmp_path / "source", tmp_path / "shards", MegatronLayout(), "local")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_shards_that_are_cut_off_or_missing_are_refused(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "source")
    shards = _import(tmp_path / "source", tmp_path / "shards", MegatronLayout(tp=2, world_size=2), "local")
    with shards.file(1).open("r+b") as file:
        file.truncate(shards.file(1).stat().st_size - 1)
    with pytest.raises(ValueError, match=r"rank-00001-of-00002.* bytes long by its header"):
        _export(shards, tmp_path / "out")
    shards.file(1).unlink()
    with pytest.raises(ValueError, match=r"must hold rank-00001-of-00002"):
        _export(shards, tmp_path / "out")


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "source")
    with pytest.raises(ValueError, match="must not exist yet"):
        _import(tmp_path / "source", tmp_path / "source", MegatronLayout(), "local")


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ([], MegatronLayout()),
        (["tp=2", "ep=4"], MegatronLayout(tp=2, ep=4, world_size=4)),
        (["pp=2", "world_size=8"], MegatronLayout(pp=2, world_size=8)),
        (["pp=2", "pipeline_layout=Et|tL"], MegatronLayout(pp=2, world_size=2, pipeline_layout="Et|tL")),
    ],
)
def test_sizes_given_as_text_make_a_layout(sizes: list[str], layout: MegatronLayout) -> None:
    assert layout_from(sizes) == layout


@pytest.mark.parametrize(
    ("size", "message"),
    [("tq=2", "must be one of tp"), ("tp", "must be one of tp"), ("tp=0", "whole number"), ("tp=x", "whole")],
)
def test_sizes_that_are_none_are_refused(size: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_from([size])
