"""Plain Lightning code for the tests, importable here and in the workers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def plain() -> Any:
    """The module `plain_digits`, which a function for the workers may name."""
    sys.path.append(str(Path(__file__).parent))
    return importlib.import_module("plain_digits")
