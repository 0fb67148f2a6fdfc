"""The driver's environment is recreated in the workers."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest
import ray

from drawbar import train
from drawbar.train import (
    Checkpoint,
    Result,
    ValidationConfig,
)
from drawbar.train.backend import DriverContext
from tests.train.runs import fit

if TYPE_CHECKING:
    from tests.train.conftest import Drivers

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data"),  # emitted by Ray Data itself
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


@pytest.fixture(scope="module")
def configured_logging() -> Iterator[None]:
    """Configure logging like `logging.basicConfig(level=INFO, format=...)`."""
    root, handler = logging.getLogger(), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s of %(name)s: %(message)s"))
    level = root.level
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    logging.getLogger("loud").setLevel(logging.ERROR)
    yield
    logging.getLogger("loud").setLevel(logging.NOTSET)
    root.removeHandler(handler)
    root.setLevel(level)


def parse_arguments() -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    return float(parser.parse_args().lr)


def get_block_size() -> int | None:
    return ray.data.DataContext.get_current().target_max_block_size


@pytest.fixture(scope="module")
def result(
    ray_cluster: None, configured_logging: None, tmp_path_factory: pytest.TempPathFactory
) -> Result:
    """Result of a run whose driver has arguments, a logging setup, and a data context."""

    def function() -> tuple[float, int | None]:
        logging.getLogger("mine").info("shown")
        logging.getLogger("loud").info("not shown")
        logging.getLogger("mine").debug("not shown")
        with train.checkpoint_dir() as path:
            train.report({}, checkpoint=path, validation=True)
        return parse_arguments(), get_block_size()

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        return {"lr": parse_arguments()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", "--lr", "0.5"])
        patch.setattr(ray.data.DataContext.get_current(), "target_max_block_size", 12345)
        return fit(
            function,
            tmp_path_factory.mktemp("run"),
            num_workers=1,
            validation_config=ValidationConfig(fn=validate),
        )


def test_command_line_arguments_are_available_in_workers_and_validation(result: Result) -> None:
    assert result.return_value[0] == 0.5
    assert result.best_checkpoints[0][1]["lr"] == 0.5


def test_logging_setup_of_driver_applies_in_workers(result: Result) -> None:
    assert Path(result.path, "logs/rank_0.log").read_text() == "INFO of mine: shown\n"


def test_data_context_of_driver_applies_in_workers(result: Result) -> None:
    assert result.return_value[1] == 12345


@pytest.mark.usefixtures("configured_logging")
def test_driver_context_apply_restores_logging_and_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context, root = DriverContext.capture(), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "argv", ["worker"])
    with context.apply():
        assert len(root.handlers) == 1
        assert sys.argv != ["worker"]
    assert (root.handlers, sys.argv) == ([], ["worker"])


class Greeter:
    def hello(self) -> str:
        return "hello"


@pytest.mark.parametrize("detached", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_ray_init_settings_of_driver_apply_in_workers(
    drivers: Drivers, tmp_path: Path, detached: bool
) -> None:
    def function() -> list[str]:
        logging.getLogger("mine").info("by Ray's logging config")
        named: Any = ray.get_actor("named")
        greeting = ray.get(named.hello.remote())
        return [
            greeting,
            os.environ["HF_HOME"],
            os.environ["OMP_NUM_THREADS"],
            os.environ["HF_TOKEN"],
        ]

    def main() -> None:
        variables = {"HF_HOME": "job's", "OMP_NUM_THREADS": "3"}
        ray.init(
            namespace="mine",
            runtime_env={"env_vars": variables},
            logging_config=ray.LoggingConfig(log_level="INFO"),
        )
        named = ray.remote(Greeter).options(name="named", num_cpus=0).remote()
        print(fit(function, tmp_path, num_workers=1, detached=detached).return_values)
        del named

    out, err = drivers.run(main, HF_HOME="shell's", HF_TOKEN="shell's")
    assert str([["hello", "job's", "3", "shell's"]]) in out
    assert "by Ray's logging config" in out + err
