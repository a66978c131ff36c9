"""The gate stops all ranks of an engine before the same step, whenever each of them is told."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.rollout.gate import Gate, alone


class Agreement:
    """The largest of what all ranks bring, as an all-reduce gives it."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._brought: dict[int, tuple[int, int]] = {}

    def of(self, rank: int):
        def agree(pauses: int, aborts: int) -> tuple[int, int]:
            self._brought[rank] = (pauses, aborts)
            self._barrier.wait(5)
            largest = tuple(max(values) for values in zip(*self._brought.values(), strict=True))
            self._barrier.wait(5)
            return largest[0], largest[1]

        return agree


def _work(gate: Gate, steps: list[int], count: int) -> bool:
    """Take ``count`` steps; whether all of them were taken."""
    with gate.beginning():
        pass
    for number in range(count):
        with gate.passing() as going_on:
            if not going_on:
                return False
            steps.append(number)
        time.sleep(0.001)
    return True


def test_no_step_is_taken_while_it_is_closed() -> None:
    gate, steps = Gate(alone, 5.0), []
    with ThreadPoolExecutor() as pool:
        working = pool.submit(_work, gate, steps, 50)
        time.sleep(0.01)
        gate.close(abort=False)
        with gate.held():
            taken = len(steps)
        time.sleep(0.05)
        assert 0 < len(steps) == taken < 50
        gate.open()
        assert working.result(5)
    assert steps == list(range(50))


def test_work_under_way_is_given_up_when_told_and_later_work_is_not() -> None:
    gate, steps = Gate(alone, 5.0), []
    with ThreadPoolExecutor() as pool:
        working = pool.submit(_work, gate, steps, 500)
        time.sleep(0.01)
        gate.close(abort=True)
        assert not working.result(5)
        later = pool.submit(_work, gate, [], 3)
        gate.open()
        assert later.result(5)


def test_closing_with_nothing_under_way_aborts_nothing() -> None:
    gate = Gate(alone, 5.0)
    gate.close(abort=True)
    gate.open()
    assert _work(gate, [], 3)


@pytest.mark.parametrize("abort", [False, True])
def test_ranks_that_are_told_one_after_the_other_stop_before_the_same_step(abort: bool) -> None:
    agreement = Agreement(2)
    gates, steps = [Gate(agreement.of(rank), 5.0) for rank in range(2)], ([], [])
    with ThreadPoolExecutor() as pool:
        for pause in range(3):
            working = [pool.submit(_work, gates[rank], steps[rank], 60) for rank in range(2)]
            for rank in (pause % 2, 1 - pause % 2):
                time.sleep(0.01)
                gates[rank].close(abort=abort)
            time.sleep(0.02)
            assert steps[0] == steps[1]
            for gate in gates:
                gate.open()
                time.sleep(0.01)
            assert [one.result(5) for one in working] == [not abort] * 2
            assert steps[0] == steps[1]


def test_a_gate_that_stays_closed_says_so() -> None:
    gate = Gate(alone, 0.05)
    gate.close(abort=False)
    with pytest.raises(TimeoutError, match=r"not resumed within 0\.05 s"), gate.beginning():
        pass
