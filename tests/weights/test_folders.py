from __future__ import annotations

from pathlib import Path

import pytest

from megarl.weights.folders import appearing, free_name


def test_a_folder_appears_with_everything_in_it(tmp_path: Path) -> None:
    with appearing(tmp_path / "parent/whole") as scratch:
        (scratch / "file").write_text("whole")
        assert not (tmp_path / "parent/whole").exists()
    assert (tmp_path / "parent/whole/file").read_text() == "whole"
    assert [path.name for path in (tmp_path / "parent").iterdir()] == ["whole"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_a_failure_nothing_is_there(error: type[BaseException], tmp_path: Path) -> None:
    def fail() -> None:
        with appearing(tmp_path / "half") as scratch:
            (scratch / "file").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    def write(name: str, file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)

    def appear_late() -> None:
        with appearing(tmp_path / "late") as scratch:
            write("new", scratch / "file")
            write("precious", tmp_path / "late/file")

    write("precious", tmp_path / "model/file")
    with pytest.raises(ValueError, match="must not exist"), appearing(tmp_path / "model"):
        pass
    with pytest.raises(OSError, match="not empty"):
        appear_late()
    assert [(tmp_path / name / "file").read_text() for name in ("model", "late")] == ["precious", "precious"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_free_name_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "model-2").mkdir()
    assert free_name(tmp_path / "model") == tmp_path / "model-3"
