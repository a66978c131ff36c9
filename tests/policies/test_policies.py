from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.data.renderer import Renderer
from megarl.policies.smollm2 import gguf_path
from megarl.policies.tiny import make_tiny_policy
from megarl.policies.upcycle import upcycle
from megarl.weights.hf_files import check_folder
from megarl.weights.spec import ModelSpec
from tests.trainer.families import VOCAB, logits_of, write_model

TEXTS = ["State the final answer: 12 + 30 =", "State the final answer: 98 - 7 ="] * 10


def _load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_an_upcycled_llama_computes_the_same_function(tmp_path: Path) -> None:
    dense = write_model("llama", tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=4, top_k=2)
    ids = np.arange(5, 45) * 7 % VOCAB
    assert np.abs(logits_of(_load(tmp_path / "moe"), ids) - logits_of(dense, ids)).max() < 1e-4
    spec = ModelSpec.from_folder(tmp_path / "moe")
    assert (spec.family, spec.experts, spec.top_k) == ("mixtral", 4, 2)
    check_folder(tmp_path / "moe", spec)


@pytest.mark.parametrize(("experts", "top_k"), [(2, 3), (4, 0)])
def test_sizes_that_do_not_fit_are_refused(experts: int, top_k: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--top-k"):
        upcycle(tmp_path / "dense", tmp_path / "moe", experts=experts, top_k=top_k)


def test_only_a_llama_can_be_upcycled_and_nothing_is_overwritten(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path / "dense")
    with pytest.raises(ValueError, match="dense Llama"):
        upcycle(tmp_path / "dense", tmp_path / "moe", experts=4, top_k=2)
    with pytest.raises(ValueError, match="smollm2"):
        upcycle(tmp_path / "nothing", tmp_path / "moe", experts=4, top_k=2)
    write_model("llama", tmp_path / "llama")
    (tmp_path / "moe").mkdir()
    with pytest.raises(ValueError, match="must not exist"):
        upcycle(tmp_path / "llama", tmp_path / "moe", experts=4, top_k=2)


def test_a_source_with_a_tensor_missing_is_refused(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "dense")
    path = tmp_path / "dense/model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        upcycle(tmp_path / "dense", tmp_path / "moe", experts=4, top_k=2)
    assert not (tmp_path / "moe").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_upcycled_smollm2_computes_what_smollm2_does(tmp_path: Path) -> None:
    from megarl.policies.smollm2 import write_smollm2

    assert gguf_path().is_file()
    write_smollm2(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", experts=4, top_k=2)
    ids = np.array(Renderer(tmp_path / "moe", 64).render([{"role": "user", "content": "3 + 4 ="}]))
    dense = logits_of(_load(tmp_path / "dense"), ids)
    assert np.abs(logits_of(_load(tmp_path / "moe"), ids) - dense).max() < 1e-4


def test_the_tiny_policy_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_policy(tmp_path / name, TEXTS, seed=seed)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    check_folder(tmp_path / "a", ModelSpec.from_folder(tmp_path / "a"))
    assert _load(tmp_path / "a").num_parameters() > 1_000_000


def test_its_tokenizer_has_a_token_for_every_digit_and_gives_any_text_back(tmp_path: Path) -> None:
    make_tiny_policy(tmp_path / "policy", TEXTS)
    renderer = Renderer(tmp_path / "policy", 64)
    *digits, end = renderer.answer_ids("-107")
    assert len(digits) == 4
    assert renderer.decode([*digits, end]) == "-107"
    assert renderer.decode(renderer.answer_ids("naïve ½ 漢字")) == "naïve ½ 漢字"
    prompt = renderer.render([{"role": "user", "content": TEXTS[0]}])
    assert renderer.decode(prompt) == TEXTS[0]
