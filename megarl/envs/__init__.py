"""Environments: how prompts become trajectories."""
