"""Policies to start from: made, warm-started or upcycled on this machine, without a download."""
