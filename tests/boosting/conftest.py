"""Workers are forked from a process that has imported XGBoost and LightGBM."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _fork_workers(preload_boosting: None) -> None:
    """Use the fork server in all modules."""
