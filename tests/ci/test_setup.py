"""ci/setup.sh, run on a stand-in interpreter that logs what it is asked to do instead of doing it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOOLS = ("bash", "cat", "cp", "dirname", "find", "grep", "head", "ls", "mkdir", "realpath", "rm", "sha256sum")
PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then echo {version}; exit; fi
if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo venv >>"$LOG"; exit; fi
echo "$*" >>"$LOG"
if [ -n "$BREAK" ] && [[ "$*" == *"$BREAK"* ]]; then exit 1; fi
"""


class Checkout:
    """A copy of what ci/setup.sh reads, and the interpreters it finds on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        (folder / "bin").mkdir()
        shutil.copytree(ROOT / "ci", folder / "ci")
        shutil.copy(ROOT / "setup.py", folder)

    def add_python(self, name: str, version: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(PYTHON.format(version=version))
        path.chmod(0o755)

    def add_compiler(self) -> None:
        (self.folder / "bin" / "cc").symlink_to("/bin/true")

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        tools = self.folder / "tools"
        if not tools.exists():
            tools.mkdir()
            for tool in TOOLS:
                (tools / tool).symlink_to(shutil.which(tool) or tool)
        environment = {"PATH": f"{self.folder / 'bin'}:{tools}", "LOG": str(self.log), "BREAK": "", **variables}
        return subprocess.run(
            ["bash", str(self.folder / "ci" / "setup.sh")],
            env=environment,
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )

    def done(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    made.add_compiler()
    return made


def test_torch_comes_first_with_its_dependencies_and_the_lock_without(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11")
    assert checkout.run().returncode == 0
    made, torch, lock, megarl, check = checkout.done()
    assert made == "venv"
    assert torch.endswith("--constraint ci/lock-py311.txt torch==2.13.0")
    assert lock.endswith("--no-deps --requirement ci/lock-py311.txt")
    assert megarl.endswith("--no-deps --no-build-isolation --editable .")
    assert check == "-W ignore ci/check_env.py ci/lock-py311.txt"


def test_a_second_run_does_nothing(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11")
    checkout.run()
    again = checkout.run()
    assert again.returncode == 0
    assert "is ready" in again.stdout
    assert checkout.done() == []


@pytest.mark.parametrize("step", ["torch==", "--requirement", "--editable", "check_env"])
def test_a_half_done_set_up_is_made_anew(checkout: Checkout, step: str) -> None:
    checkout.add_python("python3.11", "3.11")
    assert checkout.run(BREAK=step).returncode != 0
    leftover = checkout.folder / ".venv" / "half-copied"
    leftover.write_text("")
    assert checkout.run().returncode == 0
    assert len(checkout.done()) == 5
    assert not leftover.exists()


def test_a_changed_lock_is_installed_into_the_same_environment(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11")
    checkout.run()
    with (checkout.folder / "ci" / "lock-py311.txt").open("a") as lock:
        lock.write("another-package==1.0\n")
    assert checkout.run().returncode == 0
    assert "venv" not in checkout.done()
    assert len(checkout.done()) == 4


def test_an_environment_made_by_someone_else_is_left_alone(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11")
    precious = checkout.folder / ".venv" / "precious"
    precious.parent.mkdir()
    precious.write_text("")
    refused = checkout.run()
    assert refused.returncode == 1
    assert "was not made by ci/setup.sh" in refused.stderr
    assert precious.exists()


def test_another_interpreter_gets_its_own_environment_and_lock(checkout: Checkout) -> None:
    checkout.add_python("python3.11", "3.11")
    checkout.add_python("python3.12", "3.12")
    assert checkout.run(PYTHON="python3.12").returncode == 0
    assert (checkout.folder / ".venv-3.12").is_dir()
    assert not (checkout.folder / ".venv").exists()
    assert checkout.done()[-1] == "-W ignore ci/check_env.py ci/lock-py312.txt"


def test_a_shim_that_does_not_run_is_passed_over(checkout: Checkout) -> None:
    shim = checkout.folder / "bin" / "python3.11"
    shim.write_text("#!/bin/bash\nexit 127\n")
    shim.chmod(0o755)
    checkout.add_python("python3", "3.11")
    result = checkout.run()
    assert result.returncode == 0
    assert "bin/python3)" in result.stdout


def test_a_missing_compiler_is_said_before_anything_is_installed(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.add_python("python3.11", "3.11")
    refused = checkout.run()
    assert refused.returncode == 1
    assert "no C compiler" in refused.stderr
    assert checkout.done() == ["venv"]


@pytest.mark.parametrize("variables", [{}, {"PYTHON": "python3.9"}])
def test_no_usable_python_is_one_message_with_the_way_out(checkout: Checkout, variables: dict[str, str]) -> None:
    checkout.add_python("python3", "3.10")
    checkout.add_python("python3.9", "3.9")
    refused = checkout.run(**variables)
    assert refused.returncode == 1
    assert "no Python 3.11 or 3.12" in refused.stderr
    assert "PYTHON=/path/to/python3.11" in refused.stderr
    assert not (checkout.folder / ".venv").exists()
