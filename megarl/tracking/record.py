"""What a run is, written down once at its start: the config, the software and the code that ran."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from megarl.config import RunConfig
from megarl.environment import Finding, lines


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Goes into the run folder and into every tracker. Holds no passwords."""

    name: str
    config: dict[str, Any]
    """The whole resolved config as plain data."""
    environment: tuple[str, ...]
    """The lines of ``megarl env``."""
    versions: dict[str, str]
    """Of what was found, by name."""
    commit: str
    """Of megarl's own checkout; see ``environment.source_commit``."""

    def environment_text(self) -> str:
        """The environment and the commit, one line each."""
        return "".join(f"{line}\n" for line in (*self.environment, f"git commit  {self.commit}"))

    def config_yaml(self) -> str:
        """The config as a file that ``megarl train`` reads."""
        return yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True)


def describe_run(config: RunConfig, findings: Sequence[Finding], commit: str) -> RunRecord:
    """The record of a run of ``config`` on what ``environment.report`` found."""
    plain = config.model_dump(mode="json")
    plain["tracking"]["mlflow"]["uri"] = without_password(config.tracking.mlflow.uri)
    return RunRecord(
        name=config.name,
        config=plain,
        environment=tuple(lines(findings)),
        versions={finding.name: finding.version for finding in findings if finding.found},
        commit=commit,
    )


def without_password(uri: str) -> str:
    """``uri`` with the password, if it has one, as ***."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{host}"))


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Nested config to one text per leaf; no two leaves share a key.

    Example: ``{"a": {"b": 1}, "rewards": [{"name": "task"}]}`` gives ``{"a.b": "1", "rewards.0.name": "task"}``
    """
    return {".".join(path): leaf if isinstance(leaf, str) else json.dumps(leaf) for path, leaf in _leaves(config, ())}


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    children: list[tuple[str, Any]] = []
    if isinstance(node, Mapping):
        children = [(_step(str(key)), value) for key, value in node.items()]
    elif isinstance(node, list) and any(isinstance(item, (Mapping, list)) for item in node):
        children = [(str(index), item) for index, item in enumerate(node)]
    if not children:
        yield path, node
    for key, child in children:
        yield from _leaves(child, (*path, key))


def _step(key: str) -> str:
    """A key that holds a dot, or looks quoted, is quoted: it must not read as two keys."""
    return json.dumps(key) if "." in key or key.startswith('"') else key
