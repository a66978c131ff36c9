from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.advantages import ESTIMATORS, GROUP_RELATIVE, group_advantages, zero_spread

REWARDS = st.lists(st.floats(-100, 100), min_size=2, max_size=8)


def test_grpo_divides_by_the_sample_standard_deviation_plus_1e_6() -> None:
    std = math.sqrt(((0.25**2) * 3 + 0.75**2) / 3)
    assert std == 0.5
    expected = [-0.25 / 0.500001] * 3 + [0.75 / 0.500001]
    assert group_advantages("grpo", [0.0, 0.0, 0.0, 1.0]) == pytest.approx(expected, rel=1e-15)


def test_dr_grpo_only_centres() -> None:
    assert group_advantages("dr_grpo", [0.0, 0.0, 0.0, 1.0]) == [-0.25, -0.25, -0.25, 0.75]


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert group_advantages("rloo", [0.0, 1.0, 2.0]) == [-1.5, 0.0, 1.5]


def test_rloo_keeps_the_digits_of_small_differences_beside_a_huge_reward() -> None:
    big = 1e16
    assert group_advantages("rloo", [big, 1.0, 3.0])[0] == big - 2.0


def test_reinforce_is_the_reward() -> None:
    assert group_advantages("reinforce", [0.5]) == [0.5]


@pytest.mark.parametrize("name", sorted(GROUP_RELATIVE))
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(name: str, size: int) -> None:
    assert group_advantages(name, [0.1] * size) == [0.0] * size


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
def test_a_missing_reward_has_no_part_in_the_others(name: str, missing: float | None) -> None:
    without = group_advantages(name, [0.0, 1.0, 1.0])
    assert group_advantages(name, [0.0, missing, 1.0, 1.0]) == [without[0], None, *without[1:]]


def test_a_group_without_any_reward_has_no_advantages() -> None:
    assert group_advantages("grpo", [None, None]) == [None, None]


def test_spread_looks_only_at_known_rewards() -> None:
    assert zero_spread([1.0, None, 1.0])
    assert not zero_spread([1.0, None, 0.0])


@given(REWARDS)
def test_centred_advantages_sum_to_zero(rewards: list[float]) -> None:
    assert math.fsum(ESTIMATORS["dr_grpo"](rewards)) == pytest.approx(0.0, abs=1e-10)


@given(REWARDS)
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(rewards: list[float]) -> None:
    n = len(rewards)
    expected = [a * n / (n - 1) for a in ESTIMATORS["dr_grpo"](rewards)]
    assert ESTIMATORS["rloo"](rewards) == pytest.approx(expected, abs=1e-9)
