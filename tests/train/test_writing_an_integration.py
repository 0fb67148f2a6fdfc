"""Tests of the integration in docs/writing-an-integration.md."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from drawbar import train
from drawbar.train.testing import BackendContract
from tests.train.runs import fit

PAGE = Path(__file__).parents[2] / "docs" / "writing-an-integration.md"

pytestmark = pytest.mark.usefixtures("ray_cluster")
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def module_of_the_page() -> Any:
    """Import the page's first block of code as the module `hub`, which workers get by value."""
    code = CODE[0]
    module = sys.modules["hub"] = types.ModuleType("hub")
    exec(compile(code, "hub.py", "exec"), module.__dict__)
    cloudpickle.register_pickle_by_value(module)
    return module


hub = module_of_the_page()


class TestHub(BackendContract):
    backend_config = hub.HubConfig()


def test_docs_integration_averages_gradients_of_all_workers(
    run_config: train.RunConfig,
) -> None:
    def function() -> list[float]:
        rank = train.get_context().get_world_rank()
        x = np.arange(10.0)[rank::2]  # each worker has half of the points
        weights = np.zeros(2)
        for _ in range(2000):
            error = weights[0] * x + weights[1] - (3 * x + 1)
            gradient = np.array([(error * x).mean(), error.mean()])
            weights -= 0.03 * hub.average(gradient)
        train.report({"slope": weights[0]})
        return weights.tolist()

    scaling = train.ScalingConfig(num_workers=2)
    result = hub.HubTrainer(function, scaling_config=scaling, run_config=run_config).fit()
    first, second = result.return_values
    assert first == second == pytest.approx([3, 1], abs=1e-6)


def test_docs_integration_config_with_invalid_timeout_raises() -> None:
    with pytest.raises(ValueError, match=r"HubConfig\.timeout_s must be positive .* found 0"):
        hub.HubConfig(timeout_s=0)


def test_docs_callback_lists_checkpoints_of_a_killed_driver(tmp_path: Path) -> None:
    (code,) = (code for code in CODE if "class CheckpointList" in code)
    module = types.ModuleType("checkpoint_list")
    exec(compile(code, "checkpoint_list.py", "exec"), module.__dict__)

    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").touch()
            train.report({}, checkpoint=path)

    fit(function, tmp_path)
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    commit = next(number for number, line in enumerate(lines) if '"checkpoint"' in line)
    journal.write_text("".join(lines[:commit]))  # as if the driver had been killed there
    checkpoints = module.CheckpointList(str(tmp_path / "checkpoints.txt"))
    keep_one = train.CheckpointConfig(num_to_keep=1)
    fit(function, tmp_path, resume="auto", callbacks=[checkpoints])
    names = ["checkpoint_000000", "checkpoint_000001"]
    expected = [str(tmp_path / "run" / name) for name in names]
    assert Path(checkpoints.file).read_text().splitlines() == expected
    fit(function, tmp_path, resume="auto", callbacks=[checkpoints], checkpoint_config=keep_one)
    last = str(tmp_path / "run" / "checkpoint_000002")
    assert Path(checkpoints.file).read_text().splitlines() == [last]
