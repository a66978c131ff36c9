"""A small Qwen3-MoE with its own tokenizer, random weights: what ``megarl sft`` warm-starts for the default run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.weights.folders import appearing
from megarl.weights.spec import ModelSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

_PAD, _END, _SYSTEM, _USER, _ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_VOCAB = 320
_STD = 0.05
"""Of the random weights; larger than a big model's, since there are few layers and little time."""

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": _VOCAB,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_tiny_policy(folder: Path, texts: Iterable[str], *, seed: int = 0) -> None:
    """Write config, random weights and a tokenizer trained on ``texts`` to ``folder``.

    Raises:
        ValueError: ``folder`` exists.
    """
    from safetensors.torch import save_file

    with appearing(folder) as scratch:
        (scratch / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
        save_file(_random_weights(seed), scratch / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(scratch, texts)


def _random_weights(seed: int) -> dict[str, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    spec = ModelSpec.from_hf(CONFIG)
    return {
        name: (torch.randn(shape, generator=generator) * _STD if len(shape) > 1 else torch.ones(shape)).bfloat16()
        for name, shape in spec.hf_tensors().items()
    }


def _write_tokenizer(folder: Path, texts: Iterable[str]) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(texts),
        eos_token=_END,
        pad_token=_PAD,
        additional_special_tokens=[_SYSTEM, _USER, _ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)


def _train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE in which every digit is a token of its own; any text has tokens, common words have one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=[_PAD, _END, _SYSTEM, _USER, _ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
