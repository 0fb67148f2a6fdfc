"""Plain Lightning code for the tests, importable here and in the workers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def plain() -> Any:
    """Return the module `plain_digits`, which training functions can import."""
    sys.path.append(str(Path(__file__).parent))
    return importlib.import_module("plain_digits")


@pytest.fixture(scope="module", autouse=True)
def _fork_workers(preload_transformers: None) -> None:
    """Use the fork server in all modules; `tests/train` starts workers without it."""
