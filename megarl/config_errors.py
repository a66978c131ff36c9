"""What a user is told about a mistake: the key, its value, the rule and a value that works.

Two sources: pydantic's errors about single fields (``explain``), and rules over several fields, which are given as data
(``Problem``) so that a way out is tried before it is offered. Knows pydantic, but none of megarl's sections.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

Values = Mapping[str, object]
"""Keys with dots, and what to set them to."""
Location = tuple[int | str, ...]
"""Where pydantic found a mistake, such as ``("rewards", 0, "weight")``."""

_SHOWN = 80
"""Characters of a wrong value that are worth repeating."""
_RULES = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of keys to values",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be > {gt:g}",
    "greater_than_equal": "must be >= {ge:g}",
    "int_type": "must be a whole number",
    "less_than": "must be < {lt:g}",
    "less_than_equal": "must be <= {le:g}",
    "literal_error": "must be {expected}",
    "missing": "is required and missing",
    "model_type": "must be a section of keys and values",
    "path_type": "must be a path",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_short": "must not be empty",
    "string_type": "must be text",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
}
"""pydantic's error types in our words; its ``ctx`` fills the braces."""


class ConfigError(ValueError):
    """A mistake of the user's: key, rule, value, way out. Shown without a traceback, exit status 2."""


@contextmanager
def users_mistake(key: str = "") -> Iterator[None]:
    """Inside, a ValueError is a mistake of the user's; ``key`` is put before a text that does not name it.

    Raises:
        ConfigError: instead of the ValueError.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        text = str(error)
        raise ConfigError(f"{key}: {text}" if key not in text else text) from error


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that a config breaks.

    Example: ``Problem("rollout.top_k", 5, "must be 0: ...", ({"rollout.top_k": 0},))``
    """

    key: str
    value: object
    rule: str
    ways_out: tuple[Values, ...] = ()
    """In order of preference; the first that works is offered."""
    advice: str = ""
    """The way out in words, where no value of a key is one."""

    def text(self, works: Callable[[Values], bool]) -> str:
        """The whole message. When no way out mends everything, the first is offered: it mends this rule."""
        chosen = next((values for values in self.ways_out if works(values)), next(iter(self.ways_out), {}))
        return f"{self.key} ({shown(self.value)}) {self.rule}; {use(chosen) if chosen else self.advice}"


def use(values: Values) -> str:
    """``values`` as an instruction, in the form of overrides: use a.b=1 and c=2."""
    return "use " + " and ".join(f"{key}={as_yaml(value)}" for key, value in values.items())


def as_yaml(value: object) -> str:
    """``value`` as it is written behind ``key=``."""
    text = yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, width=2**20, sort_keys=False)
    return text.strip().removesuffix("...").strip()


def shown(value: object) -> str:
    """``value`` as YAML, cut when long."""
    text = as_yaml(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def suggest(word: str, known: list[str], what: str) -> str:
    """What was probably meant by ``word``, or everything that is known."""
    close = closest(word, known)
    if close:
        return f"did you mean {close}?"
    return f"{what}: {', '.join(known)}" if known else f"there are no {what}"


def closest(word: str, known: list[str]) -> str | None:
    """The known word that ``word`` is most like, None when it is like none."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), None)


# --- pydantic's errors -----------------------------------------------------------------------------------------------


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """All mistakes that pydantic found in a ``root``, one a line, as one message."""
    lines = [_explain_one(item, root) for item in error.errors()]
    if len(lines) == 1:
        return lines[0]
    return "\n".join([f"{len(lines)} mistakes in the config:", *(f"  {line}" for line in lines)])


def _explain_one(item: ErrorDetails, root: type[BaseModel]) -> str:
    location, kind, context = item["loc"], item["type"], item.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "extra_forbidden":
        return _unknown_key(location, item["input"], root)
    rule = _RULES[kind].format(**context) if kind in _RULES else item["msg"][0].lower() + item["msg"][1:]
    given = "" if kind == "missing" else f" ({shown(item['input'])})"
    return f"{_dotted(location)}{given} {rule}; {use(_working_values(location, item['input'], root))}"


def _unknown_key(location: Location, value: object, root: type[BaseModel]) -> str:
    word, section = str(location[-1]), _section_at(root, location[:-1])
    beside = list(section.model_fields) if section else []
    close = closest(word, beside)
    found = [_dotted((*location[:-1], close))] if close else _keys_called(word, root)
    start = f"unknown key {_dotted(location)} ({shown(value)})"
    if not found:
        return f"{start}: the keys here are {', '.join(beside)}; remove it or use one of them"
    leaves = [_leaves(name, value) for name in found]
    if len(leaves[0]) > 1:
        return f"{start}: the section is called {found[0]}; use {found[0]}"
    return f"{start}: there is {' and '.join(found)}; " + ", or ".join(use(values) for values in leaves)


def _leaves(key: str, value: object) -> dict[str, object]:
    """``value`` as overrides: a section is taken apart."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {name: leaf for inner, part in value.items() for name, leaf in _leaves(f"{key}.{inner}", part).items()}


def _working_values(location: Location, given: object, root: type[BaseModel]) -> Values:
    """Values that pass at ``location``: the choice most like ``given``, the default, or the example of the field."""
    while location and isinstance(location[-1], int):  # an entry of a list has no default, the list has
        location = location[:-1]
    field = _field_at(root, location)
    if field is None:  # inside a free mapping
        return {_dotted(location[:1]): {}}
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
    close = closest(str(given), choices)
    if close:
        return {_dotted(location): close}
    if not field.is_required():
        return {_dotted(location): field.get_default(call_default_factory=True)}
    section = _section_of(field.annotation)
    if section is None:
        assert field.examples, f"{_dotted(location)} is required and needs an example of a value that works"
        return {_dotted(location): field.examples[0]}
    required = [name for name, inner in section.model_fields.items() if inner.is_required()]
    return {key: v for name in required for key, v in _working_values((*location, name), None, root).items()}


def _field_at(root: type[BaseModel], location: Location) -> FieldInfo | None:
    section: type[BaseModel] | None = root
    field = None
    for part in location:
        if isinstance(part, int):
            continue
        if section is None or part not in section.model_fields:
            return None
        field = section.model_fields[part]
        section = _section_of(field.annotation)
    return field


def _section_at(root: type[BaseModel], location: Location) -> type[BaseModel] | None:
    if not location:
        return root
    field = _field_at(root, location)
    return None if field is None else _section_of(field.annotation)


def _section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds, also where it holds a list of them or perhaps one."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _keys_called(word: str, section: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted keys anywhere below ``section`` that end in ``word``."""
    found = []
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if name == word:
            found.append(prefix + name)
        if inner is field.annotation and inner is not None:
            found += _keys_called(word, inner, f"{prefix}{name}.")
    return found


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)
