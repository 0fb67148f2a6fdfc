"""Handles to a run: wait, stop, inspect, and follow it from this or another process."""
