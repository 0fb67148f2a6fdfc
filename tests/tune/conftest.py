"""Fixtures of the tests of drawbar.tune: driver processes."""

from tests.train.conftest import drivers, wait_until_gone

__all__ = ["drivers", "wait_until_gone"]
