"""Shared by the tests of drawbar.tune: drivers of their own, and their ends."""

from tests.train.conftest import drivers, wait_until_gone

__all__ = ["drivers", "wait_until_gone"]
