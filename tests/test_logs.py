"""Log records and the ends of log files."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

from megarl.logs import last_lines, recorded


def test_last_lines_of_a_short_a_long_and_a_missing_file(tmp_path):
    file = tmp_path / "log"
    assert last_lines(file, 3) == ()
    file.write_text("one\ntwo\n")
    assert last_lines(file, 3) == ("one", "two")
    file.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert last_lines(file, 2) == ("line 99998", "line 99999")


def test_bytes_that_are_no_text_do_not_hide_the_rest(tmp_path):
    file = tmp_path / "log"
    file.write_bytes(b"\xff\xfe\nreason\n")
    assert last_lines(file, 1) == ("reason",)


def test_megarl_is_heard_from_info_and_others_from_warning_each_on_one_line():
    code = (
        "import logging; from megarl.logs import configure; configure('trainer-1');"
        "logging.getLogger('megarl.x').info('mine'); logging.getLogger('other').info('noise');"
        "logging.getLogger('other').warning('theirs')"
    )
    errors = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    mine, theirs = errors.splitlines()
    assert mine.endswith("trainer-1 INFO megarl.x: mine")
    assert theirs.endswith("trainer-1 WARNING other: theirs")


def test_records_of_megarl_go_to_a_file_while_it_is_open(tmp_path: Path) -> None:
    with recorded(tmp_path / "logs/driver.log"):
        logging.getLogger("megarl.weights.sync").info("version 3")
        logging.getLogger("elsewhere").error("not ours")
    logging.getLogger("megarl.weights.sync").warning("afterwards")
    lines = (tmp_path / "logs/driver.log").read_text().splitlines()
    assert [line.partition("INFO ")[2] for line in lines] == ["megarl.weights.sync: version 3"]
