"""Helpers that know nothing about runs, and private APIs of Ray."""
