"""Thread settings follow from cores and from who computes at once."""

from __future__ import annotations

import pytest

from megarl.orchestration.threads import thread_env


def test_a_process_alone_takes_all_cores_bound_with_a_short_spin():
    env = thread_env(2, 1)
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["OMP_PROC_BIND"] == "true"
    assert env["GOMP_SPINCOUNT"] == "20000"


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 2, "1"), (8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_several_at_once_share_the_cores_and_neither_spin_nor_bind(cores, processes, threads):
    env = thread_env(cores, processes)
    assert env["OMP_NUM_THREADS"] == threads
    assert env["OMP_WAIT_POLICY"] == "passive"
    assert env["OMP_PROC_BIND"] == "false"


def test_both_cases_set_the_same_keys_so_that_nothing_is_inherited():
    assert thread_env(2, 1).keys() == thread_env(2, 2).keys()


@pytest.mark.parametrize(("cores", "processes"), [(0, 1), (2, 0)])
def test_counts_below_one_are_refused(cores, processes):
    with pytest.raises(ValueError, match="must be >= 1"):
        thread_env(cores, processes)
