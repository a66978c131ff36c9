"""What MLflow takes: names and values within its rules, without two of ours becoming one of its."""

from __future__ import annotations

import hashlib
import math
import posixpath
import re

MAX_KEY = 250
MAX_PARAM = 6000
"""Characters of a parameter's value."""
MAX_TAG = 8000
MAX_PARAMS_PER_BATCH = 100

_REFUSED = re.compile(r"[^A-Za-z0-9_./ :-]")
_DIGEST = 16


def accepted_name(name: str) -> str:
    """``name`` itself where MLflow takes it; else its allowed characters and a digest, so that no two names meet.

    MLflow refuses other characters, more than 250 of them, and what would not stay itself as a path (``a//b``, ``/a``).

    Example: ``accepted_name("reward_part/50%")`` gives ``reward_part/50_-2d03af45a6adbb1d``
    """
    if not _REFUSED.search(name) and len(name) <= MAX_KEY and _is_own_path(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
    parts = (_REFUSED.sub("_", part) for part in name.split("/") if part not in ("", ".", ".."))
    return f"{'/'.join(parts).lstrip('.')[: MAX_KEY - _DIGEST - 1]}-{digest}"


def accepted_value(value: str, limit: int = MAX_PARAM) -> str:
    """``value`` itself, or its start and a digest of the whole: two long values that differ still do."""
    if len(value) <= limit:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:_DIGEST]
    note = f" ... ({len(value)} characters, sha256 {digest}; whole in config.yaml)"
    return value[: limit - len(note)] + note


def accepted_number(value: float) -> float:
    """``value``, with NaN for infinity, which MLflow would store as the largest double and no chart survives."""
    return value if math.isfinite(value) else math.nan


def _is_own_path(name: str) -> bool:
    return name == posixpath.normpath(name) and name != "." and not name.startswith(("..", "/"))
