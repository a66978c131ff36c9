"""What is kept of a run: metrics by name, rollouts, versions, curves, comparisons. Nothing here can stop a run."""
