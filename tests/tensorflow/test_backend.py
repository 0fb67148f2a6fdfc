"""How TensorFlow's workers are set up, and what is refused before they start."""

from __future__ import annotations

import pytest

from drawbar.tensorflow import TensorflowConfig, TensorflowTrainer
from drawbar.train import RunConfig, TrainingFailedError
from drawbar.train.testing import BackendContract, run_in_threads


@pytest.mark.usefixtures("ray_cluster")
class TestContract(BackendContract):
    backend_config = TensorflowConfig()


def test_a_config_checks_itself() -> None:
    with pytest.raises(TypeError, match="legacy_keras must be a bool, found 'yes'"):
        TensorflowConfig(legacy_keras="yes")  # type: ignore[arg-type]


def test_the_trainer_takes_only_a_tensorflow_config() -> None:
    with pytest.raises(TypeError, match="tensorflow_config must be a TensorflowConfig, found 2"):
        TensorflowTrainer(print, tensorflow_config=2)  # type: ignore[arg-type]


def test_ranks_in_threads_are_refused(run_config: RunConfig) -> None:
    with pytest.raises(TrainingFailedError, match="TensorFlow knows one worker per process"):
        run_in_threads(print, backend_config=TensorflowConfig(), run_config=run_config)
