"""examples/run_moe_grpo.sh: which config it takes and what it hands to megarl."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Checkout:
    """A copy of the script with a megarl and an nvidia-smi that only print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "examples").mkdir()
        shutil.copy(ROOT / "examples" / "run_moe_grpo.sh", folder / "examples")
        self.write(".venv/bin/megarl", 'echo "megarl $* in $PWD"')
        self.write("ci/setup.sh", 'echo "set up $VENV"')

    def write(self, name: str, script: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def run(self, *arguments: str, gpus: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        self.write("bin/nvidia-smi", "\n".join(f"echo 'GPU {n}: NVIDIA H200 (UUID: GPU-{n})'" for n in range(gpus)))
        return subprocess.run(
            ["bash", str(self.folder / "examples" / "run_moe_grpo.sh"), *arguments],
            env={**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"},
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder = tmp_path / "megarl"
    folder.mkdir()
    return Checkout(folder)


@pytest.mark.parametrize(("gpus", "config"), [(0, "configs/moe_grpo_cpu.yaml"), (8, "configs/qwen3_30b_a3b_grpo.yaml")])
def test_the_default_config_follows_the_gpus_and_is_named(checkout: Checkout, gpus: int, config: str) -> None:
    result = checkout.run("max_steps=2", gpus=gpus)
    assert result.returncode == 0
    assert f"config {config}, chosen for {gpus} GPUs" in result.stdout
    assert f"megarl train {config} max_steps=2 in {checkout.folder}" in result.stdout


def test_a_number_of_gpus_without_a_default_says_what_to_do(checkout: Checkout) -> None:
    result = checkout.run(gpus=2)
    assert result.returncode == 2
    assert "found 2 GPUs" in result.stderr
    assert "bash examples/run_moe_grpo.sh configs/" in result.stderr
    assert "megarl train" not in result.stdout


def test_a_config_beside_the_caller_is_found_from_any_folder(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("")
    result = checkout.run("own.yaml", "seed=1", "max_steps=2", gpus=2, cwd=tmp_path)
    assert f"megarl train {tmp_path}/own.yaml seed=1 max_steps=2 in {checkout.folder}" in result.stdout


def test_a_missing_environment_is_set_up_first(checkout: Checkout) -> None:
    (checkout.folder / ".venv" / "bin" / "megarl").unlink()
    checkout.write(
        "ci/setup.sh", "echo '#!/bin/bash' >.venv/bin/megarl; chmod +x .venv/bin/megarl; echo \"set up $VENV\""
    )
    result = checkout.run()
    assert result.returncode == 0
    assert "set up .venv" in result.stdout


def test_an_unfinished_environment_is_set_up_again(checkout: Checkout) -> None:
    (checkout.folder / ".venv" / "megarl-setup").write_text("unfinished\n")
    assert "set up .venv" in checkout.run().stdout


def test_an_own_environment_is_used_as_it_is(checkout: Checkout) -> None:
    assert "set up" not in checkout.run(gpus=8).stdout


def test_gpus_without_an_environment_are_not_given_the_cpu_stack(checkout: Checkout) -> None:
    (checkout.folder / ".venv" / "bin" / "megarl").unlink()
    result = checkout.run(gpus=8)
    assert result.returncode == 2
    assert ".[gpu]" in result.stderr
    assert "set up" not in result.stdout
