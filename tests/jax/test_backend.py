"""JaxConfig: connection of the processes, platform, and validation."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import jax
import pytest

from drawbar.jax import JaxConfig, JaxTrainer
from drawbar.train import RunConfig, ScalingConfig, TrainingFailedError
from drawbar.train.testing import BackendContract, run_in_threads

RAY_VERSION = tuple(map(int, importlib.metadata.version("ray").split(".")[:2]))
needs_slices = pytest.mark.skipif(RAY_VERSION < (2, 54), reason="TPU slices need Ray 2.54")


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
class TestContract(BackendContract):
    backend_config = JaxConfig()


@needs_slices
def test_platform_follows_scaling_config() -> None:
    gpus = JaxTrainer(print, scaling_config=ScalingConfig(num_workers=2, use_gpu=True))
    tpus = JaxTrainer(print, scaling_config=slice_of(num_workers=2))
    cpus = JaxTrainer(print)
    found = [trainer.backend_config for trainer in (gpus, tpus, cpus)]
    assert found == [JaxConfig(use_gpu=True), JaxConfig(use_tpu=True), JaxConfig()]
    assert [config.platform for config in found if isinstance(config, JaxConfig)] == [
        "cuda",
        "tpu",
        "cpu",
    ]


def slice_of(num_workers: int | tuple[int, int], **options: Any) -> ScalingConfig:
    """Ask for slices of eight chips on two hosts."""
    return ScalingConfig(
        num_workers=num_workers,
        **{"use_tpu": True, "topology": "2x2x2", "accelerator_type": "TPU-V4", **options},
    )


def test_slice_with_older_ray_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.util.tpu", None)
    with pytest.raises(ImportError, match=r"topology='2x2x2'\) needs Ray 2\.54 or later, found"):
        slice_of(num_workers=2)


@needs_slices
def test_worker_resources_match_slice_host() -> None:
    config = slice_of(num_workers=2, label_selector={"ray.io/tpu-slice-name": "a"})
    assert config.bundle == {"TPU": 4, "accelerator_type:TPU-V4": 0.001}
    labels = {"ray.io/tpu-topology": "2x2x2", "ray.io/tpu-slice-name": "a"}
    assert config.label_selectors == [labels, labels]
    assert slice_of(num_workers=8, resources_per_worker={"TPU": 1}).num_tpus_per_worker == 1


@needs_slices
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 3}, "num_workers=3, but a slice of topology '2x2x2' has 2 workers"),
        ({"num_workers": (1, 2)}, r"num_workers=\(1, 2\), but a slice"),
        ({"topology": None}, "num_workers=2, so all TPUs must be in one slice. Set topology= and"),
        ({"accelerator_type": None}, "set accelerator_type= too"),
        ({"topology": "2x"}, "topology='2x' and .*no TPU slice that workers can divide"),
        ({"accelerator_type": "A100"}, "no TPU slice .* Invalid accelerator_type: A100"),
        ({"resources_per_worker": {"TPU": 3}}, r"not divisible by TPUs requested per worker \(3\)"),
    ],
)
def test_workers_that_do_not_fit_slice_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slice_of(**{"num_workers": 2, **options})


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_config_without_worker_accelerator_raises(kind: str) -> None:
    config = JaxConfig(**{f"use_{kind}": True})
    with pytest.raises(ValueError, match=rf"Set ScalingConfig\(use_{kind}=True\)"):
        config.check_requirements(ScalingConfig(num_workers=2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"use_gpu": 1}, TypeError, "use_gpu must be a bool, found 1"),
        ({"timeout_s": 0}, ValueError, "at least 1, found 0"),
        ({"heartbeat_timeout_s": 1.5}, TypeError, "must be an int, found 1.5"),
        ({"use_gpu": True, "use_tpu": True}, ValueError, "one kind"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        JaxConfig(**arguments)


def test_trainer_with_other_config_raises() -> None:
    with pytest.raises(TypeError, match="jax_config must be a JaxConfig, found 'gpu'"):
        JaxTrainer(print, jax_config="gpu")  # type: ignore[arg-type]


def test_ranks_in_threads_are_refused(run_config: RunConfig) -> None:
    with pytest.raises(TrainingFailedError, match="JAX supports one rank per process"):
        run_in_threads(print, backend_config=JaxConfig(), run_config=run_config)


def test_error_of_repeated_initialize_has_advice(
    run_config: RunConfig,
) -> None:
    trainer = JaxTrainer(
        lambda: jax.distributed.initialize(),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    )
    with pytest.raises(TrainingFailedError, match=r"Remove jax\.distributed\.initialize"):
        trainer.fit()


def test_jax_platforms_setting_is_restored(run_config: RunConfig) -> None:
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
