"""Reading a config: YAML, overrides, and rules over several fields. What the command line says is in test_bad_input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import RunConfig, load
from megarl.config_errors import ConfigError
from tests.e2e.runs import CONFIG, ROOT

ADVICE = re.compile(r"(?:use|and) ([a-z_.]+=[^\s,;]+)")
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_that_is_shipped_is_right(path: Path) -> None:
    assert load(path).name


def test_overrides_reach_sections_lists_and_keys_that_the_file_lacks() -> None:
    config = load(
        CONFIG,
        [
            "trainer.optimizer.lr=2e-3",
            "algorithm.kl.coef=0.001",
            "rewards=[{name: task}, {name: exact_match}]",
            "rewards.1.weight=0.5",
            "data.path=own.jsonl",
            "output=here",
            "recovery={every: 7}",
            "tracking.mlflow.uri=http://host:5000",
        ],
    )
    assert config.trainer.optimizer.lr == 2e-3
    assert config.algorithm.kl.coef == 0.001
    assert [part.weight for part in config.rewards] == [1.0, 0.5]
    assert (config.data.path, config.run_folder) == (Path("own.jsonl"), Path("here") / config.name)
    assert (config.recovery.every, config.tracking.mlflow.uri) == (7, "http://host:5000")


def test_a_config_survives_being_written_and_read(tmp_path: Path) -> None:
    config = load(CONFIG)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load(tmp_path / "again.yaml") == config


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("max_steps=true", "must be a whole number"),
        ("max_steps=2.5", "must be a whole number"),
        ("max_steps='3'", "must be a whole number"),
        ("name=12", "must be text"),
        ("tracking.mlflow.enabled=1", "must be true or false"),
        ("rollout.temperature=.nan", "must be a finite number"),
        ("rollout.temperature=.inf", "must be a finite number"),
        ("data.path=3", "must be a path"),
        ("data.eval=3", "must be a section"),
        ("data.options=3", "must be a mapping"),
        ("rewards=task", "must be a list"),
    ],
)
def test_nothing_is_taken_for_another_type(override: str, rule: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} \(.*\) {rule}.*; use {re.escape(key)}="):
        load(CONFIG, [override])


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("seed: 1\ndata: {task: a}\nseed: 2\n")
    with pytest.raises(ConfigError, match="the key seed stands twice"):
        load(tmp_path / "twice.yaml")


def test_what_is_required_is_asked_for_with_an_example(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path / "empty.yaml")
    advice = ADVICE.findall(str(refusal.value))
    assert {item.partition("=")[0] for item in advice} == {
        *("name", "max_steps", "prompts_per_step", "group_size", "data.task", "trainer.model")
    }
    assert load(tmp_path / "empty.yaml", advice).rollout == RunConfig.model_fields["rollout"].default


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("rollout.temprature=0.7", ["rollout.temperature=0.7"]),
        ("rolout.temperature=0.7", ["rollout.temperature=0.7"]),
        ("trainer.paralel.tp=1", ["trainer.parallel.tp=1"]),
        ("tp=1", ["trainer.parallel.tp=1"]),
        ("temperature=0.7", ["data.eval.temperature=0.7", "rollout.temperature=0.7"]),
    ],
)
def test_an_unknown_key_is_traced_to_the_one_that_was_meant(override: str, meant: list[str]) -> None:
    with pytest.raises(ConfigError, match="unknown key") as refusal:
        load(CONFIG, [override])
    assert ADVICE.findall(str(refusal.value)) == meant


def test_all_mistakes_in_single_keys_are_in_one_message() -> None:
    with pytest.raises(ConfigError) as refusal:
        load(CONFIG, ["max_steps=0", "rollout.dtype=fp16"])
    head, *lines = str(refusal.value).splitlines()
    assert head == "2 mistakes in the config:"
    assert [line.split()[0] for line in lines] == ["max_steps", "rollout.dtype"]


@given(
    sizes=st.fixed_dictionaries(dict.fromkeys(("world_size", "tp", "pp", "ep", "etp"), SIZES)),
    batch=st.tuples(st.integers(1, 20), st.integers(1, 5), st.integers(1, 3)),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(2, 90), st.integers(1, 90)),
)
def test_advice_leads_to_a_config_that_is_right(
    sizes: dict[str, int], batch: tuple[int, int, int], lengths: tuple[int, int, int, int]
) -> None:
    keys = ("prompts_per_step", "group_size", "algorithm.updates_per_step", "data.max_prompt_tokens")
    keys += ("rollout.max_tokens", "rollout.max_model_len", "trainer.max_tokens_per_micro_batch")
    overrides = [f"trainer.parallel.{name}={size}" for name, size in sizes.items()]
    overrides += [f"{key}={value}" for key, value in zip(keys, (*batch, *lengths), strict=True)]
    for _ in range(6):  # one rule at a time, and there are six
        refusal = _refusal(overrides)
        if refusal is None:
            return
        overrides += ADVICE.findall(refusal)
    raise AssertionError(refusal)


def _refusal(overrides: list[str]) -> str | None:
    try:
        load(CONFIG, overrides)
    except ConfigError as error:
        return str(error)
    return None
