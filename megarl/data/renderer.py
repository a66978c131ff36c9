"""The one place where text becomes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.types import Message


class Renderer:
    """The tokenizer and chat template of a model folder."""

    def __init__(self, folder: Path, max_prompt_tokens: int) -> None:
        self._folder = folder
        self._max_prompt_tokens = max_prompt_tokens

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt, ready for the policy's answer.

        Raises:
            ValueError: it is longer than ``data.max_prompt_tokens``.
        """
        ids = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(ids) > self._max_prompt_tokens:
            start = messages[-1]["content"][:60]
            raise ValueError(
                f"a prompt of {len(ids)} tokens exceeds data.max_prompt_tokens ({self._max_prompt_tokens}): "
                f"{start!r}...; use data.max_prompt_tokens={len(ids)}"
            )
        return tuple(ids)

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """An answer as a policy would write it: its tokens and the end of turn."""
        return (*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Text for people and verifiers; special tokens are left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text
