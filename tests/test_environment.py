from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl import environment
from megarl.environment import NOT_FOUND, Finding, lines, render, report, source_commit


def test_the_report_names_everything_that_decides_how_a_run_behaves() -> None:
    findings = {finding.name: finding for finding in report()}
    assert list(findings) == [
        "Python", "torch", "CUDA", "Megatron-Core", "Transformer Engine", "NVIDIA apex", "flash-attn", "Triton", "vLLM",
        "Ray", "MLflow", "cores", "memory", "shared memory",
    ]  # fmt: skip
    assert all(finding.used_for and finding.stands_in for finding in findings.values())
    assert findings["torch"].version.startswith("2.")
    assert int(findings["cores"].version) >= 1


def test_the_pyramid_toolkit_called_apex_is_not_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _apex() == NOT_FOUND
    (package / "optimizers").mkdir()
    (package / "optimizers" / "__init__.py").write_text("")
    assert _apex() == "unknown version"


def _apex() -> str:
    return next(finding.version for finding in report() if finding.name == "NVIDIA apex")


def test_a_report_imports_no_framework_but_torch() -> None:
    code = (
        "import sys; from megarl.environment import report; report(); "
        "print([m for m in ('ray', 'vllm', 'megatron', 'mlflow', 'triton', 'transformer_engine') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_part_says_what_stands_in(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("Ray", "2.6", "starts processes", "nothing"), Finding("TE", NOT_FOUND, "fp8", "local layers")]
    assert lines(findings) == ["Ray  2.6 (starts processes)", "TE   not found (stands in: local layers)"]
    render(findings)
    printed = capsys.readouterr().out
    assert "stands in when missing" in printed
    assert "local layers" in printed


def test_the_commit_of_another_checkout_around_an_installed_package_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    installed = tmp_path / "environment.py"
    installed.write_text("")
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert source_commit() == "unknown"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "y"], check=True)
    assert len(source_commit()) == 40
    installed.write_text("changed")
    assert source_commit().endswith("-dirty")
