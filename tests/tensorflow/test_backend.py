"""TensorflowConfig: setup of the workers and validation."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from drawbar.tensorflow import TensorflowCheckpoint, TensorflowConfig, TensorflowTrainer
from drawbar.train import RunConfig, ScalingConfig, TrainingFailedError
from drawbar.train.testing import BackendContract, run_in_threads


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
class TestContract(BackendContract):
    backend_config = TensorflowConfig()


def test_config_with_invalid_arguments_raises() -> None:
    with pytest.raises(TypeError, match="use_legacy_keras must be a bool, found 'yes'"):
        TensorflowConfig(use_legacy_keras="yes")  # type: ignore[arg-type]


def test_trainer_with_other_config_raises() -> None:
    with pytest.raises(TypeError, match="tensorflow_config must be a TensorflowConfig, found 2"):
        TensorflowTrainer(print, tensorflow_config=2)  # type: ignore[arg-type]


def test_ranks_in_threads_are_refused(run_config: RunConfig) -> None:
    with pytest.raises(TrainingFailedError, match="TensorFlow supports one worker per process"):
        run_in_threads(print, backend_config=TensorflowConfig(), run_config=run_config)


def test_error_of_keras_3_under_a_strategy_has_advice(run_config: RunConfig) -> None:
    """The error has this word; see test_restart.py."""

    def function() -> None:
        raise ValueError("Invalid dtype: <class 'PerReplica'>")

    here = ScalingConfig(num_workers=0)
    with pytest.raises(TrainingFailedError, match=r"Use drawbar\.keras\.KerasTrainer"):
        TensorflowTrainer(function, scaling_config=here, run_config=run_config).fit()


def test_models_become_checkpoints_and_back(tmp_path: Path) -> None:
    keras = importlib.import_module("tf_keras")
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])
    model.save(tmp_path / "saved", save_format="tf")
    for checkpoint in (
        TensorflowCheckpoint.from_model(model),
        TensorflowCheckpoint.from_saved_model(tmp_path / "saved"),
    ):
        found = checkpoint.get_model()
        assert (found(np.ones((1, 2))).numpy() == model(np.ones((1, 2))).numpy()).all()


def test_get_model_without_model_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not name its model file"):
        TensorflowCheckpoint(tmp_path).get_model()
    with pytest.raises(ValueError, match=r"needs the path of an existing \.h5 file, found 'a'"):
        TensorflowCheckpoint.from_h5("a")
    with pytest.raises(ValueError, match="needs the path of an existing directory, found 'a'"):
        TensorflowCheckpoint.from_saved_model("a")


@pytest.mark.nightly
def test_worker_startup_prints_nothing() -> None:
    code = (
        "from drawbar.tensorflow import TensorflowConfig; TensorflowConfig().process_setup_hook()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
