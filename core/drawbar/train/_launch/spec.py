"""From what a trainer was given to a `RunSpec`: checked, packed, with the driver's surroundings."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drawbar.train._carry import carry, keep
from drawbar.train._controller.run import RunSpec
from drawbar.train._group.validators import ValidationWork
from drawbar.train._launch import preflight
from drawbar.train._launch.opening import named
from drawbar.train._messages import WorkerSpec
from drawbar.train._settings.checks import fields_of
from drawbar.train._settings.data_config import DataConfig
from drawbar.train._settings.forwarded import forwarded
from drawbar.train._settings.function_identity import FunctionIdentity
from drawbar.train._settings.run_config import RunConfig
from drawbar.train._settings.scaling_config import ScalingConfig
from drawbar.train._settings.secrets import without_secrets
from drawbar.train._settings.validation_config import ValidationConfig
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._surroundings import Surroundings
from drawbar.train._worker.actor import Payload


def make_spec(
    payload: Payload,
    *,
    function: FunctionIdentity,
    scaling_config: ScalingConfig,
    run_config: RunConfig,
    datasets: Mapping[str, object],
    dataset_config: DataConfig,
    metadata: Mapping[str, object],
    resume_from_checkpoint: Checkpoint | None,
    validation_config: ValidationConfig | None,
) -> RunSpec:
    """Serialize the arguments of a trainer into a `RunSpec`.

    Args:
        payload: Training function and its config.
        function: Identity of the training function.
        scaling_config: As for the trainer, like all arguments that follow.

    Raises:
        TypeError, ValueError: An argument cannot be serialized. The message names it.
    """
    preflight.check_pickles("train_loop_config", payload.config)
    if validation_config is not None:
        preflight.check_pickles("validation_config.fn", validation_config.fn)
    preflight.check_function_pickles(payload.function)
    worker = WorkerSpec(
        # Now, and not when a worker starts: the user may set a variable right after `start()`.
        environment=forwarded(os.environ, run_config.forward_env),
        surroundings=Surroundings.here(),
        metadata=dict(metadata),
        cpus=(scaling_config.resources_per_worker or {}).get("CPU"),
        validation=validation_config.defaults if validation_config else None,
    )
    restorable = {
        # Each packed by itself: one that does not unpickle any more can be given anew to
        # `restore()`.
        "train_loop_per_worker": payload.function,
        "train_loop_config": payload.config,
        "backend_config": payload.backend_config,
        "scaling_config": scaling_config,
        "dataset_config": dataset_config,
        "metadata": metadata,
        "validation_config": validation_config,
    }
    return RunSpec(
        payload=carry(payload, shares=True),
        function=function,
        worker=worker,
        trainer=keep({name: carry(value) for name, value in restorable.items()}),
        settings=_settings(payload, function, scaling_config, run_config, validation_config),
        scaling_config=scaling_config,
        run_config=named(run_config),
        backend_config=payload.backend_config,
        dataset_config=dataset_config,
        datasets=datasets,
        resume_from_checkpoint=resume_from_checkpoint,
        validation=_validation(validation_config, worker, run_config),
    )


def _validation(
    config: ValidationConfig | None, worker: WorkerSpec, run_config: RunConfig
) -> ValidationWork | None:
    if config is None:
        return None
    assert worker.surroundings is not None  # a spec has the driver's
    return ValidationWork.of(
        config, worker.environment, worker.surroundings, run_config.worker_runtime_env
    )


def _settings(
    payload: Payload,
    function: FunctionIdentity,
    scaling_config: ScalingConfig,
    run_config: RunConfig,
    validation_config: ValidationConfig | None,
) -> dict[str, object]:
    """Return the settings that a resumed run compares with its last start, by key."""
    config = {} if payload.config is None else payload.config
    named = config if isinstance(config, Mapping) else {"": config}
    return {
        "train_loop_per_worker": str(function),
        "train_loop_config": without_secrets(named, run_config.secrets),
        "scaling_config": fields_of(scaling_config),
        "failure_config": fields_of(run_config.failure_config),
        "checkpoint_config": fields_of(run_config.checkpoint_config),
        "validation_config": validation_config and validation_config.as_settings(),
    }
