"""Validation of KerasConfig, trainer, and model before training."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

from drawbar.keras import KerasConfig, KerasTrainer, prepare_model
from drawbar.train import (
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    collective,
    get_context,
)


@pytest.fixture
def keras() -> Any:
    """Keras in this very process."""
    return importlib.import_module("keras")


def test_fit_with_zero_workers_restores_environment(run_config: RunConfig) -> None:
    imported = sys.modules.get("keras")  # its backend cannot change
    importlib.import_module("jax")  # sets variables
    before = dict(os.environ)
    trainer = KerasTrainer(
        lambda: collective.all_gather(get_context().get_world_rank()),
        keras_backend=imported.backend.backend() if imported else "jax",
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    )
    assert trainer.fit().return_values == [[0]]
    assert dict(os.environ) == before


def test_config_with_unknown_backend_raises() -> None:
    with pytest.raises(ValueError, match="one of 'torch', 'jax', 'tensorflow', found 'mx"):
        KerasTrainer(print, keras_backend="mxnet")  # type: ignore[arg-type]


def test_config_with_missing_backend_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jax" else found(name)
    )
    with pytest.raises(ModuleNotFoundError, match='run: pip install "jax>='):
        KerasConfig("jax").check_requirements(ScalingConfig(num_workers=2))


@pytest.mark.usefixtures("keras")
def test_trainer_with_imported_other_backend_raises(run_config: RunConfig) -> None:
    here = ScalingConfig(num_workers=0)
    trainer = KerasTrainer(print, keras_backend="jax", scaling_config=here, run_config=run_config)
    with pytest.raises(TrainingFailedError, match="Keras was already imported with"):
        trainer.fit()


def test_prepare_model_without_compile_or_build_raises(keras: Any) -> None:
    with pytest.raises(ValueError, match=r"is not built. Add a keras.Input"):
        prepare_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="is not compiled"):
        prepare_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))


@pytest.mark.nightly
def test_tensorflow_with_other_backend_is_imported_lazily() -> None:
    """Keras must not import TensorFlow, but set its seed when other code imports it."""
    code = """if True:
        import sys
        from drawbar.keras import KerasConfig
        KerasConfig("jax").process_setup_hook()
        import keras
        keras.utils.set_random_seed(3)
        keras.saving.serialize_keras_object(keras.layers.Dense(1))
        print("tensorflow" in sys.modules)
        import tensorflow
        print(tensorflow.compat.v1.get_seed(None)[0])
    """
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "3"]
