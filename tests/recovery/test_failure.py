"""What a person reads when a run broke."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from megarl.recovery.failure import WorkerFailed, describe

FAILED = WorkerFailed("trainer", 1, "train_step", "ValueError: loss is nan", Path("logs/trainer-1.log"), ("a", "b"))


def test_a_failed_worker_is_told_with_its_name_its_log_and_what_to_do():
    lines = describe(FAILED).splitlines()
    assert lines[0] == "trainer rank 1 failed in train_step: ValueError: loss is nan"
    assert lines[1:4] == ["Last lines of logs/trainer-1.log:", "  | a", "  | b"]
    assert "the same command continues" in lines[4]


def test_a_dead_worker_without_a_log_says_so():
    error = WorkerFailed("engine", 0, "generate", "SYSTEM_ERROR", Path("logs/engine-0.log"), (), died=True)
    assert "engine rank 0 died in generate" in describe(error)
    assert "wrote nothing to logs/engine-0.log" in describe(error)


def test_notes_of_an_error_are_told():
    error = OSError("no space")
    error.add_note("while loading step 20")
    assert describe(error).splitlines()[:2] == ["OSError: no space", "while loading step 20"]


@pytest.mark.parametrize("twin", [copy.copy(FAILED), pickle.loads(pickle.dumps(FAILED))])
def test_copies_of_the_error_say_the_same(twin):
    assert describe(twin) == describe(FAILED)
