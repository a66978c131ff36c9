"""Rewards: what a trajectory is worth. Model output is hostile input; a reward that fails is None, never 0."""

from megarl.rewards.rubric import Rubric, make_rewards

__all__ = ["Rubric", "make_rewards"]
