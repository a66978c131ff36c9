"""Who sleeps while the trainer works."""

from __future__ import annotations

import pytest

from megarl.orchestration.placement import Colocated, Disaggregated


class Engine:
    def __init__(self, events: list[str]) -> None:
        self.events = events

    async def sleep(self) -> None:
        self.events.append("sleep")

    async def wake(self) -> None:
        self.events.append("wake")


async def test_colocated_engines_sleep_while_the_trainer_works():
    events: list[str] = []
    async with Colocated([Engine(events), Engine(events)]).training():
        events.append("train")
    assert events == ["sleep", "sleep", "train", "wake", "wake"]


async def test_engines_are_not_woken_after_an_error():
    events: list[str] = []
    with pytest.raises(ArithmeticError):
        async with Colocated([Engine(events)]).training():
            raise ArithmeticError
    assert events == ["sleep"]


@pytest.mark.parametrize("placement", [Colocated(), Disaggregated()])
async def test_without_sleepers_training_goes_straight_on(placement):
    trained = False
    async with placement.training():
        trained = True
    assert trained
