"""Runs that several tests look at."""

from __future__ import annotations

import pytest

from tests.e2e.runs import CUT, SHORT, Run, trained


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps that nothing disturbed."""
    return trained(tmp_path_factory.mktemp("whole"), *CUT)


@pytest.fixture(scope="session")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps with rollouts one step ahead of the training."""
    return trained(tmp_path_factory.mktemp("asynchronous"), *SHORT, "max_steps=4", "max_staleness=1")
