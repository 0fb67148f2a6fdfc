"""Processes of a run: environment, serialization, output, errors, and death."""
