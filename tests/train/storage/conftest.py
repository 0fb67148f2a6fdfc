"""Fixtures of storage tests: settings that a test cannot reach with real times and sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawbar.train._history import report_log
from drawbar.train._storage import journal_file, retries


@pytest.fixture
def quick_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep work directories in the test's directory, and shorten retry delays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(retries, "INITIAL_DELAY_S", 0.001)


@pytest.fixture
def early_slow_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warn of operations of storage that take longer than 0.01 s."""
    monkeypatch.setattr(retries, "SLOW_WARNING_PERIOD_S", 0.01)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close segments of reports, and upload parts of the journal, after 1000 bytes."""
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(journal_file, "PART_BYTES", 1000)
