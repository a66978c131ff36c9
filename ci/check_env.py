"""Checks an environment against its lock file: versions, imports, and packages that must not be there.

    python ci/check_env.py ci/lock-py311.txt

Exit status 0 when everything holds, 1 with one line per problem otherwise.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

IMPORTS = (
    ("torch", ""),
    ("megatron.core", ""),
    ("vllm", "LLM"),
    ("ray", ""),
    ("mlflow", ""),
    ("transformers", ""),
    ("reasoning_gym", ""),
    ("megarl", ""),
)
"""(module, name to take from it); vllm imports its engine only when LLM is taken."""

UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Their registry builds do not load beside a CPU build of torch, and vllm and transformers import them when present."""


def main(lock: Path) -> int:
    """Print every problem; the exit status."""
    problems = [*wrong_versions(read_lock(lock)), *unwanted_packages()] or broken_imports()
    for problem in problems:
        print(f"check_env: {problem}", file=sys.stderr)
    if problems:
        print(f"check_env: remove {sys.prefix} and run `bash ci/setup.sh` again", file=sys.stderr)
    return 1 if problems else 0


def read_lock(path: Path) -> dict[str, str]:
    """Package name -> version, from lines ``name==version``; a line of another form is an error."""
    pins = {}
    for line in path.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, sign, pinned = line.partition("==")
        if not sign:
            raise ValueError(f"{path}: {line!r} must have the form name==version")
        pins[name] = pinned
    return pins


def wrong_versions(pins: dict[str, str]) -> list[str]:
    """One line per package that is missing or of another version; a local part such as ``+cpu`` does not count."""
    problems = []
    for name, pinned in pins.items():
        found = installed_version(name)
        if found is None:
            problems.append(f"{name} {pinned} is not installed")
        elif found.partition("+")[0] != pinned:
            problems.append(f"{name} is {found}, the lock says {pinned}")
    return problems


def unwanted_packages() -> list[str]:
    """One line per package that must not be there."""
    return [f"{name} must not be installed" for name in UNWANTED if installed_version(name) is not None]


def installed_version(name: str) -> str | None:
    """The version in this environment, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def broken_imports() -> list[str]:
    """One line per import that fails, with its error."""
    problems = []
    for module, name in IMPORTS:
        try:
            found = importlib.import_module(module)
            if name:
                getattr(found, name)
        except Exception as error:  # noqa: BLE001  a foreign package may raise anything while it loads
            problems.append(f"import of {module} {name}".rstrip() + f" fails: {type(error).__name__}: {error}")
    return problems


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
