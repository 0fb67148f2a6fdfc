"""What is refused before anything is trained."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from drawbar.keras import KerasConfig, KerasTrainer, prepare_model
from drawbar.train import RunConfig, ScalingConfig, TrainingFailedError


@pytest.fixture
def keras() -> Any:
    """Keras in this very process."""
    return importlib.import_module("keras")


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="one of 'torch', 'jax', 'tensorflow' or None, found 'mx"):
        KerasTrainer(print, keras_backend="mxnet")  # type: ignore[arg-type]


def test_a_backend_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jax" else found(name)
    )
    with pytest.raises(ModuleNotFoundError, match=r'pip install "drawbar\[jax\]"'):
        KerasConfig("jax").preflight(ScalingConfig(num_workers=2))


@pytest.mark.usefixtures("keras")
def test_keras_with_another_backend_in_this_process_is_refused(run_config: RunConfig) -> None:
    here = ScalingConfig(num_workers=0)
    trainer = KerasTrainer(print, keras_backend="jax", scaling_config=here, run_config=run_config)
    with pytest.raises(TrainingFailedError, match="but Keras was imported with"):
        trainer.fit()


def test_a_model_must_be_compiled_and_built(keras: Any) -> None:
    with pytest.raises(ValueError, match="is not built; prepare_model takes one that has a keras"):
        prepare_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="is not compiled"):
        prepare_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
