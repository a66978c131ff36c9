"""Rollouts: prompts through engines to scored groups."""
