"""Tests of the check whether this machine can fork workers."""

import pytest

from drawbar.train.testing import find_fork_obstacle


def test_process_is_forked_from_a_server_with_modules() -> None:
    assert find_fork_obstacle(["numpy"]) == ""


def test_empty_preload_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAWBAR_FORKSERVER_PRELOAD", "")
    assert find_fork_obstacle() == "DRAWBAR_FORKSERVER_PRELOAD is empty"
