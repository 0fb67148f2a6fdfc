"""Shared by all tests: one Ray per test process, and a place for runs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from drawbar.train import RunConfig


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the seed of tests/train/test_chaos.py be set: the one that it printed when it failed."""
    parser.addoption("--chaos-seed", type=int, default=secrets.randbelow(10**6))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray with 8 logical CPUs and 4 logical GPUs, whatever the machine has."""
    ray.init(
        address="local",  # never one that happens to run on this machine
        num_cpus=8,
        num_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))) or 4,  # real ones, or logical
        include_dashboard=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    """Put the run below the test's own folder, under the name `run`."""
    return RunConfig(name="run", storage_path=tmp_path)
