"""How JAX's processes meet, on what they compute, and what is refused before they start."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from drawbar.jax import JaxConfig, JaxTrainer
from drawbar.train import RunConfig, ScalingConfig, TrainingFailedError
from drawbar.train.testing import BackendContract, run_in_threads


@pytest.mark.usefixtures("ray_cluster")
class TestContract(BackendContract):
    backend_config = JaxConfig()


def test_what_is_computed_on_is_that_of_the_scaling_config() -> None:
    gpus = JaxTrainer(print, scaling_config=ScalingConfig(num_workers=2, use_gpu=True))
    tpus = JaxTrainer(print, scaling_config=ScalingConfig(num_workers=2, use_tpu=True))
    cpus = JaxTrainer(print)
    found = [trainer.backend_config for trainer in (gpus, tpus, cpus)]
    assert found == [JaxConfig(use_gpu=True), JaxConfig(use_tpu=True), JaxConfig()]
    assert [config.platform for config in found if isinstance(config, JaxConfig)] == [
        "cuda",
        "tpu",
        "cpu",
    ]


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_an_accelerator_that_the_workers_do_not_have_is_refused(kind: str) -> None:
    config = JaxConfig(**{f"use_{kind}": True})
    with pytest.raises(ValueError, match=rf"set ScalingConfig\(use_{kind}=True\)"):
        config.preflight(ScalingConfig(num_workers=2))


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"use_gpu": 1}, TypeError, "use_gpu must be a bool, found 1"),
        ({"timeout_s": 0}, ValueError, "at least 1 second, found 0"),
        ({"heartbeat_timeout_s": 1.5}, TypeError, "must be an int, found 1.5"),
        ({"use_gpu": True, "use_tpu": True}, ValueError, "one kind"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        JaxConfig(**arguments)


def test_the_trainer_takes_only_a_jax_config() -> None:
    with pytest.raises(TypeError, match="jax_config must be a JaxConfig, found 'gpu'"):
        JaxTrainer(print, jax_config="gpu")  # type: ignore[arg-type]


def test_ranks_in_threads_are_refused(run_config: RunConfig) -> None:
    with pytest.raises(TrainingFailedError, match="JAX knows one rank per process"):
        run_in_threads(print, backend_config=JaxConfig(), run_config=run_config)


def test_the_settings_of_this_process_are_given_back(run_config: RunConfig) -> None:
    before = platforms()

    def function() -> tuple[str, int]:
        return jax.devices()[0].platform, jax.process_count()

    result = JaxTrainer(
        function, scaling_config=ScalingConfig(num_workers=0), run_config=run_config
    ).fit()
    assert result.return_values == [("cpu", 1)]
    assert platforms() == before


def platforms() -> str | None:
    found: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    return found
