"""Tasks: where problems come from, which of them are held out, and how an answer is verified.

A training stream is infinite and has random access: ``train(number)`` is a function of the run's seed and the number,
so the position in the data is one integer. Whether a problem is held out is decided by a hash of its text, so warm
start, training and evaluation agree on it whatever their seeds and sizes are.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from megarl.config import DataConfig
from megarl.types import Message, Prompt

_GYM = "reasoning_gym/"
_HELDOUT_ONE_IN = 8


class Task(Protocol):
    """A source of problems with its own verifier."""

    def train(self, number: int) -> Prompt:
        """Problem ``number`` of the training stream."""
        ...

    def heldout(self) -> list[Prompt]:
        """The fixed held-out problems, numbered from 0."""
        ...

    def answer_text(self, prompt: Prompt) -> str:
        """A right answer, as a policy should write it."""
        ...

    def verify(self, prompt: Prompt, answer: str) -> float:
        """How right ``answer`` is, from 0 to 1."""
        ...


def make_task(config: DataConfig, seed: int) -> Task:
    """The task that ``config`` names.

    Raises:
        ValueError: there is no such task, its options or its files are wrong.
    """
    if config.task == "jsonl":
        return JsonlTask(config)
    if config.task.startswith(_GYM):
        return GymTask(config, seed)
    raise ValueError(
        f"data.task ({config.task}) must be {_GYM}<dataset> or jsonl; use data.task={_GYM}chain_sum, or "
        "data.task=jsonl with data.path=FILE for own problems"
    )


def _messages(config: DataConfig, question: str) -> tuple[Message, ...]:
    user: Message = {"role": "user", "content": question}
    return ({"role": "system", "content": config.system_prompt}, user) if config.system_prompt else (user,)


def is_held_out(question: str) -> bool:
    """Whether a problem with this text belongs to the held-out part: one in eight, the same everywhere and always."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % _HELDOUT_ONE_IN == 0


class GymTask:
    """A procedural dataset of reasoning-gym: its generator and its verifier."""

    _HELDOUT_SEED = 2**62
    _RUN_SEEDS = 2**40
    """Distance between the streams of two run seeds: reasoning-gym adds a problem's number to the seed."""
    _REDRAW = 2**32
    """Distance to the problem that replaces a held-out one."""
    _MAX_REDRAWS = 1000
    _MAX_DRAWS_PER_PROBLEM = 500
    """Draws per held-out problem before there are taken to be too few different ones."""

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._config = config
        self._name = config.task.removeprefix(_GYM)
        self._dataset = _create_gym(self._name, config.options)
        self._train_seed = (seed + 1) * self._RUN_SEEDS
        self.train(0)

    def train(self, number: int) -> Prompt:
        """Problem ``number`` of this run's stream, never a held-out one."""
        for redraw in range(self._MAX_REDRAWS):
            entry = self._entry(self._train_seed + number + redraw * self._REDRAW)
            if not is_held_out(entry["question"]):
                return self._prompt(number, entry)
        raise ValueError(
            f"data.task ({self._config.task}) has too few problems: {self._MAX_REDRAWS} draws in a row were held out; "
            "use data.options with more problems"
        )

    def heldout(self) -> list[Prompt]:
        """The first ``eval.num_prompts`` different problems of the held-out stream."""
        return [self._prompt(number, entry) for number, entry in enumerate(self._heldout_entries)]

    def answer_text(self, prompt: Prompt) -> str:
        """The generator's own answer."""
        return str(json.loads(prompt.target)["answer"])

    def verify(self, prompt: Prompt, answer: str) -> float:
        """The dataset's own score, of what stands in ``<answer>`` tags where the policy wrote some."""
        from reasoning_gym.utils import extract_answer

        marked = extract_answer(answer)
        return float(
            self._dataset.score_answer((answer if marked is None else marked).strip(), json.loads(prompt.target))
        )

    @cached_property
    def _heldout_entries(self) -> list[dict[str, Any]]:
        wanted = self._config.eval.num_prompts
        found: dict[str, dict[str, Any]] = {}
        for number in range(wanted * self._MAX_DRAWS_PER_PROBLEM):
            entry = self._entry(self._HELDOUT_SEED + number)
            if is_held_out(entry["question"]):
                found.setdefault(entry["question"], entry)
            if len(found) == wanted:
                return list(found.values())
        raise ValueError(
            f"data.eval.num_prompts ({wanted}) must be at most the number of different held-out problems of "
            f"{self._config.task} with these data.options ({len(found)} were found); "
            + (f"use data.eval.num_prompts={len(found)}" if found else "use data.options with more problems")
        )

    def _entry(self, index: int) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = self._dataset[index]
        except IndexError:
            raise ValueError(
                f"data.task ({self._config.task}) must be procedural: this one is a list of {len(self._dataset)} "
                f"problems; use data.task={_GYM}chain_sum, or write the list to a file for data.task=jsonl"
            ) from None
        return entry

    def _prompt(self, number: int, entry: dict[str, Any]) -> Prompt:
        return Prompt(number, _messages(self._config, entry["question"]), json.dumps(entry, default=str))


def _create_gym(name: str, options: dict[str, Any]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {_GYM}{close[0]}? use" if close else "use"
        hint += f" data.task={_GYM}{close[0] if close else 'chain_sum'}"
        raise ValueError(f"data.task ({_GYM}{name}) must be a dataset of reasoning-gym; {hint}")
    try:
        return reasoning_gym.create_dataset(name, seed=0, size=1, **options)
    except (TypeError, AssertionError, ValueError) as error:
        fields = ", ".join(f for f in DATASETS[name][1].__dataclass_fields__ if f not in ("seed", "size"))
        raise ValueError(
            f"data.options ({options}) do not fit {_GYM}{name}: {error}; its options are {fields}; "
            "use data.options={} for its own defaults"
        ) from error


@dataclass(frozen=True, slots=True)
class _Row:
    question: str
    answer: str


class JsonlTask:
    """An own file of problems, one ``{"prompt": ..., "answer": ...}`` a line; right is the same text."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        train, heldout = _read_rows(config.path, "data.path"), _read_rows(config.eval_path, "data.eval_path")
        self._heldout = heldout[: config.eval.num_prompts]
        texts = {row.question for row in self._heldout}
        self._train = [row for row in train if row.question not in texts]
        if not self._train:
            raise ValueError(
                f"data.path ({config.path}) must hold problems that are not in data.eval_path; it has none"
            )

    def train(self, number: int) -> Prompt:
        """Rows in file order, over and over."""
        return self._prompt(number, self._train[number % len(self._train)])

    def heldout(self) -> list[Prompt]:
        """The first rows of ``eval_path``."""
        return [self._prompt(number, row) for number, row in enumerate(self._heldout)]

    def answer_text(self, prompt: Prompt) -> str:
        """The answer in the file."""
        return prompt.target

    def verify(self, prompt: Prompt, answer: str) -> float:
        """1 for the same text, apart from spaces around it."""
        return float(answer.strip() == prompt.target.strip())

    def _prompt(self, number: int, row: _Row) -> Prompt:
        return Prompt(number, _messages(self._config, row.question), row.answer)


def _read_rows(path: Path | None, key: str) -> list[_Row]:
    if path is None or not path.is_file():
        raise ValueError(f"{key} ({path}) must be a file of problems for data.task=jsonl; use {key}=FILE")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append(_Row(str(row["prompt"]), str(row["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}, line {number} must be {{"prompt": ..., "answer": ...}} ({type(error).__name__}: {error}); '
                "mend the line"
            ) from error
    if not rows:
        raise ValueError(f"{key} ({path}) must hold at least one problem; it is empty")
    return rows
