"""Workers start without the fork server, as the first ones of a driver do."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _start_fresh(start_without_fork_server: None) -> None:
    """Let each worker import its modules itself."""
