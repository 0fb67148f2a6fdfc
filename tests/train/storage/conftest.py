"""Fixtures of storage tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawbar.train._storage import retries as retry


@pytest.fixture
def quick_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep work directories in the test's directory, and shorten retry delays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "INITIAL_DELAY_S", 0.001)
