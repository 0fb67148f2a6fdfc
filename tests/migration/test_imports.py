"""Tests that replacing `ray.train` by `drawbar.train` with sed works for all import styles."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from types import ModuleType

import cloudpickle
import pytest

import drawbar.jax
import drawbar.keras
import drawbar.lightgbm
import drawbar.lightning
import drawbar.tensorflow
import drawbar.torch
import drawbar.transformers
import drawbar.xgboost
from drawbar import train

WINDOWS = {
    "torch": drawbar.torch,
    "lightning": drawbar.lightning,
    "huggingface.transformers": drawbar.transformers,
    "jax": drawbar.jax,
    "keras": drawbar.keras,
    "tensorflow": drawbar.tensorflow,
    "xgboost": drawbar.xgboost,
    "lightgbm": drawbar.lightgbm,
}

LAZY = """
import sys
from drawbar import train
assert {"torch", "xgboost"} <= set(dir(train))
assert not {"torch", "xgboost", "drawbar.torch"} & set(sys.modules)
train.xgboost.RayTrainReportCallback
assert "drawbar.xgboost" in sys.modules and "drawbar.torch" not in sys.modules
"""


@pytest.mark.parametrize(("path", "integration"), WINDOWS.items(), ids=WINDOWS)
def test_integration_is_importable_under_ray_train_path(path: str, integration: ModuleType) -> None:
    window = importlib.import_module(f"drawbar.train.{path}")
    for name in integration.__all__:
        value = getattr(window, name)
        assert value is getattr(integration, name)
        assert pickle.loads(pickle.dumps(value)) is value


def test_integrations_are_attributes_of_drawbar_train() -> None:
    assert train.torch.TorchTrainer is drawbar.torch.TorchTrainer
    callback = train.huggingface.transformers.RayTrainReportCallback
    assert callback is drawbar.transformers.RayTrainReportCallback
    keras = importlib.import_module("drawbar.train.tensorflow.keras")
    assert keras.ReportCheckpointCallback is drawbar.keras.ReportCheckpointCallback


def test_aliases_are_attributes_of_their_parents() -> None:
    assert train.v2.api.config.RunConfig is train.RunConfig  # type: ignore[attr-defined]
    assert train.context.get_context is train.get_context  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"drawbar.train.v2.api has no SyncConfig: leave it"):
        train.v2.api.SyncConfig  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'torhc'"):
        train.v2.torhc  # type: ignore[attr-defined]  # noqa: B018


def test_integrations_are_imported_on_first_use() -> None:
    subprocess.run([sys.executable, "-c", LAZY], check=True)


def test_missing_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'drawbar.train' has no attribute 'torhc'"):
        getattr(train, "torhc")  # noqa: B009  # mypy knows that it is not there
    command = [sys.executable, "-c", "from drawbar import train; train.torhc"]
    shown = subprocess.run(command, capture_output=True, text=True).stderr
    assert "Did you mean: 'torch'?" in shown  # by Python itself, where it shows the error


def test_aliases_are_pickled_by_name() -> None:
    alias = importlib.import_module("drawbar.train.torch.config")
    assert cloudpickle.loads(cloudpickle.dumps(alias)) is alias


def test_star_import_of_an_alias_imports_its_public_names() -> None:
    names: dict[str, object] = {}
    exec("from drawbar.train.v2.api.config import *", names)
    assert names["RunConfig"] is train.RunConfig
