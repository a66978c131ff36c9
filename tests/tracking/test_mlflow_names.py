from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.entities import Metric
from mlflow.utils.validation import _validate_length_limit, _validate_metric_name

from megarl.tracking.mlflow_names import MAX_KEY, MAX_PARAM, accepted_name, accepted_number, accepted_value

ODD = ["", ".", "..", "/a", "a/", "a//b", "a/../b", "../a", "a%b", "a b", "é", "a\nb", "x" * 251, "..a/%", "a/.%"]


def accepted_by_mlflow(name: str) -> None:
    _validate_metric_name(name)
    _validate_length_limit("Metric name", MAX_KEY, name)
    assert Metric(name, 1.0, 0, 0).key == name


@pytest.mark.parametrize("name", ODD)
def test_mlflow_takes_every_name(name: str) -> None:
    accepted_by_mlflow(accepted_name(name))


@given(st.text(max_size=300))
def test_mlflow_takes_any_text_as_a_name(name: str) -> None:
    accepted_by_mlflow(accepted_name(name))


@given(st.text(alphabet="ab/.%é -_", max_size=6), st.text(alphabet="ab/.%é -_", max_size=6))
def test_two_names_never_become_one(one: str, other: str) -> None:
    assert (accepted_name(one) == accepted_name(other)) == (one == other)


@pytest.mark.parametrize("name", ["reward/mean", "reward_part/tasks.py:score", "a b", "trainer.optimizer.lr"])
def test_a_name_that_mlflow_takes_stays(name: str) -> None:
    assert accepted_name(name) == name


def test_a_long_value_is_cut_and_still_differs_from_another() -> None:
    one, other = accepted_value("x" * 7000 + "1"), accepted_value("x" * 7000 + "2")
    assert len(one) == len(other) == MAX_PARAM
    assert one != other
    assert "7001 characters" in one
    assert accepted_value("x" * MAX_PARAM) == "x" * MAX_PARAM


def test_infinity_becomes_nan() -> None:
    assert math.isnan(accepted_number(-math.inf))
    assert accepted_number(2.5) == 2.5
