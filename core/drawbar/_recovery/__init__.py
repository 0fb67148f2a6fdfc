"""Failures: restart decisions, draining nodes, and in-place recovery."""
