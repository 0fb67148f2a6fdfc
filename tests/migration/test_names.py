"""Tests that public names of Ray Train exist or raise with a replacement."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import torch
from lightgbm import Dataset
from lightgbm import train as lightgbm_train
from torch import nn
from xgboost import DMatrix
from xgboost import train as xgboost_train

from drawbar import train
from drawbar.lightgbm import LightGBMCheckpoint, normalize_pandas_for_lightgbm
from drawbar.torch import TorchCheckpoint
from drawbar.xgboost import XGBoostCheckpoint

MODULES = (
    "",
    "collective",
    "torch",
    "lightning",
    "huggingface.transformers",
    "tensorflow",
    "xgboost",
    "lightgbm",
)
BACKENDS = ("Backend", "Torch", "Tensorflow", "XGBoost", "LightGBM")
LEFT_OUT = {
    "SyncConfig": "only Ray Tune uses it; RunConfig refuses it there too",
    "NCCLHangError": "HangError: for any backend",
}
LEFT_OUT_ARGUMENTS = {
    "Result(metrics_dataframe=)": "it is read from the journal",
    "Result(return_value=)": "the first of return_values",
    "PreemptionError(drain_timed_out=)": "part of the message",
}
LEFT_OUT_MEMBERS = {
    "ScalingConfig.as_placement_group_factory": "drawbar.tune.as_placement_group_factory",
    "ScalingConfig.from_placement_group_factory": "of Ray Tune",
    "Result.config": "raises there; the journal has the config",
    "RunConfig.storage_context": "internal there",
    "RayLightningEnvironment.teardown": "Lightning's, whose class it becomes when it is made",
    **{f"{name}Config.framework": "for Ray's statistics" for name in BACKENDS},
    **{f"{name}Config.to_dict": "for Ray's dashboard" for name in BACKENDS},
    **{f"{name}Checkpoint.get_preprocessor": "deprecated there" for name in BACKENDS},
    **{f"{name}Checkpoint.set_preprocessor": "deprecated there" for name in BACKENDS},
}


def names_of(module: Any) -> list[str]:
    return [name for name in module.__all__ if not name.startswith("_")]


def incumbent(path: str) -> Any:
    return importlib.import_module(f"ray.train.{path}".rstrip("."))


@pytest.mark.filterwarnings("ignore")  # Ray's own deprecations
@pytest.mark.parametrize("path", MODULES)
def test_ray_train_public_names_exist(path: str) -> None:
    ours = importlib.import_module(f"drawbar.train.{path}".rstrip("."))
    missing = [
        name
        for name in names_of(incumbent(path))
        if name not in LEFT_OUT and not hasattr(ours, name)
    ]
    assert missing == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", MODULES)
def test_ray_train_arguments_are_accepted(path: str) -> None:
    ours, wrong = importlib.import_module(f"drawbar.train.{path}".rstrip(".")), []
    for name in names_of(incumbent(path)):
        value = getattr(incumbent(path), name)
        if not callable(value) or name in LEFT_OUT:
            continue
        wrong += [f"{name}({each}=)" for each in arguments(value) - arguments(getattr(ours, name))]
    assert [each for each in wrong if each not in LEFT_OUT_ARGUMENTS] == []


def arguments(value: Any) -> set[str]:
    """Return the arguments of a function or class; rejected arguments may have any name."""
    replaced = getattr(value, "_replacements", {})
    try:
        taken = inspect.signature(value).parameters
    except ValueError:
        return set()
    named = {
        each.name
        for each in taken.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    return {name for name in named if not name.startswith("_")} | set(replaced)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", MODULES)
def test_ray_train_class_members_exist(path: str) -> None:
    ours, missing = importlib.import_module(f"drawbar.train.{path}".rstrip(".")), []
    for name in names_of(incumbent(path)):
        kind = getattr(incumbent(path), name)
        if not inspect.isclass(kind) or name in LEFT_OUT:
            continue
        theirs = [base for base in kind.__mro__ if base.__module__.startswith("ray.")]
        members = {each for base in theirs for each in vars(base) if each[0] != "_"}
        mine = getattr(ours, name)
        members -= arguments(mine)
        missing += [
            f"{name}.{each}"
            for each in sorted(members)
            if not hasattr(mine, each) and f"{name}.{each}" not in LEFT_OUT_MEMBERS
        ]
    assert missing == []


@pytest.mark.parametrize("name", [*LEFT_OUT, "horovod"])
def test_name_without_counterpart_raises_with_replacement(
    name: str,
) -> None:
    assert not hasattr(train, name)
    with pytest.raises(AttributeError, match=f"drawbar.train has no {name}: "):
        getattr(train, name)
    with pytest.raises(ImportError, match=f"drawbar.train has no {name}: "):
        exec(f"from drawbar.train import {name}")


def test_torch_checkpoint_round_trip_restores_model() -> None:
    model = nn.Linear(2, 1)
    whole = TorchCheckpoint.from_model(model)
    weights = TorchCheckpoint.from_state_dict(model.state_dict())
    for loaded in (whole.get_model(), weights.get_model(nn.Linear(2, 1))):
        assert torch.equal(loaded.weight, model.weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contains a state dict, not a model"):
        weights.get_model()


def test_booster_checkpoint_round_trip_restores_model() -> None:
    frame = pd.DataFrame({"x": range(50)})
    tree = xgboost_train({}, DMatrix(frame, frame.x), 1)
    assert XGBoostCheckpoint.from_model(tree).get_model().num_boosted_rounds() == 1
    forest = lightgbm_train({"verbose": -1}, Dataset(frame, frame.x), 1)
    assert LightGBMCheckpoint.from_model(forest).get_model().num_trees() == 1


def test_arrow_backed_frames_are_converted_for_lightgbm() -> None:
    table = pa.table({"i": pa.array([1, None], pa.int8()), "b": [True, False], "s": ["a", "b"]})
    frame = table.to_pandas(types_mapper=pd.ArrowDtype)
    frame["n"] = [0.5, 1.5]
    kinds = normalize_pandas_for_lightgbm(frame).dtypes
    assert [str(kind) for kind in kinds] == ["Int8", "boolean", "string[pyarrow]", "float64"]
