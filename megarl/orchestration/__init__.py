"""Processes: who starts them, what they see of the machine, and how all of them stop."""
