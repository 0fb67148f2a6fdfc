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
