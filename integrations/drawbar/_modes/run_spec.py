"""Build the RunSpec from the arguments of a trainer, and load the arguments of an earlier run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

import cloudpickle

from drawbar._base.fields import to_journal_dict
from drawbar._base.secrets import redact_settings
from drawbar._base.train_function import FunctionIdentity
from drawbar._modes.pickle_checks import (
    check_pickles,
    check_train_function_pickles,
    warn_of_large_function,
)
from drawbar._process.driver_env import DriverEnvironment, select_forwarded
from drawbar._process.errors import DamagedRunError
from drawbar._process.serialization import Serialized, serialize, serialize_without_references
from drawbar._storage.checkpoint import Checkpoint
from drawbar.train._config.data_source import DataSource
from drawbar.train._config.run_config import RunConfig
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._config.validation_config import ValidationConfig
from drawbar.train._controller.run import RunSpec
from drawbar.train._driver.open_run import add_defaults
from drawbar.train._protocol.assignment import Sampler, WorkerSpec
from drawbar.train._worker.train_loop import TrainLoop
from drawbar.train._worker_group.validator import ValidationTask


def make_run_spec(
    train_loop: TrainLoop,
    *,
    function: FunctionIdentity,
    scaling_config: ScalingConfig,
    run_config: RunConfig,
    data_source: DataSource | None,
    dataset_config: object,
    metadata: Mapping[str, object],
    resume_from_checkpoint: Checkpoint | None,
    validation_config: ValidationConfig | None,
    samplers: tuple[Sampler, ...],
) -> RunSpec:
    """Serialize the arguments of a trainer into a `RunSpec`.

    Args:
        train_loop: Training function and its config.
        function: Identity of the training function.
        scaling_config: As in the trainer.
        run_config: As in the trainer.
        data_source: Data of the workers; None if the trainer has no datasets.
        dataset_config: As in the trainer, for `restore()`.
        metadata: As in the trainer.
        resume_from_checkpoint: As in the trainer.
        validation_config: As in the trainer.
        samplers: As in `WorkerSpec`.

    Returns:
        The spec.

    Raises:
        TypeError: An argument cannot be serialized. The message names it.
    """
    worker = _make_worker_spec(scaling_config, run_config, metadata, validation_config, samplers)
    trainer_arguments: dict[str, object] = {
        "train_loop_per_worker": train_loop.function,
        "train_loop_config": train_loop.config,
        "backend_config": train_loop.backend_config,
        "scaling_config": scaling_config,
        "dataset_config": dataset_config,
        "metadata": metadata,
        "validation_config": validation_config,
    }
    try:
        serialized = serialize(train_loop, should_share_buffers=True)
        trainer_state = _serialize_trainer_state(trainer_arguments)
        validation_task = _make_validation_task(validation_config, worker, run_config)
    except Exception:
        _check_pickles(train_loop, validation_config)
        raise
    warn_of_large_function(train_loop.function, serialized.size)
    return RunSpec(
        train_loop=serialized,
        function=function,
        worker_spec=worker,
        trainer_state=trainer_state,
        config_record=_make_config_record(
            train_loop, function, scaling_config, run_config, validation_config
        ),
        scaling_config=scaling_config,
        run_config=add_defaults(run_config),
        backend_config=train_loop.backend_config,
        data_source=data_source,
        resume_from_checkpoint=resume_from_checkpoint,
        validation_task=validation_task,
    )


def _make_worker_spec(
    scaling_config: ScalingConfig,
    run_config: RunConfig,
    metadata: Mapping[str, object],
    validation_config: ValidationConfig | None,
    samplers: tuple[Sampler, ...],
) -> WorkerSpec:
    return WorkerSpec(
        # Captured now and not when a worker starts: users may set a variable right after `start()`.
        env_vars=select_forwarded(os.environ, run_config.forward_env),
        driver_env=DriverEnvironment.capture(),
        metadata=dict(metadata),
        num_cpus=(scaling_config.resources_per_worker or {}).get("CPU"),
        default_validation=validation_config.default_validation if validation_config else None,
        samplers=samplers,
    )


def _check_pickles(train_loop: TrainLoop, validation_config: ValidationConfig | None) -> None:
    """Find the parts of the user's arguments that cannot be pickled.

    Raises:
        TypeError: A part cannot be pickled. The message names it.
    """
    check_pickles("train_loop_config", train_loop.config)
    if validation_config is not None:
        check_pickles("validation_config.fn", validation_config.fn)
    check_train_function_pickles(train_loop.function)


def _make_validation_task(
    config: ValidationConfig | None, worker: WorkerSpec, run_config: RunConfig
) -> ValidationTask | None:
    if config is None:
        return None
    assert worker.driver_env is not None
    return ValidationTask.from_config(
        config, worker.env_vars, worker.driver_env, run_config.worker_runtime_env
    )


def _make_config_record(
    train_loop: TrainLoop,
    function: FunctionIdentity,
    scaling_config: ScalingConfig,
    run_config: RunConfig,
    validation_config: ValidationConfig | None,
) -> dict[str, object]:
    """Return the settings that a resumed run compares with its last start, by key."""
    config = {} if train_loop.config is None else train_loop.config
    named = config if isinstance(config, Mapping) else {"": config}
    return {
        "train_loop_per_worker": str(function),
        "train_loop_config": redact_settings(named, run_config.secret_keys),
        "scaling_config": to_journal_dict(scaling_config),
        "failure_config": to_journal_dict(run_config.failure_config),
        "checkpoint_config": to_journal_dict(run_config.checkpoint_config),
        "validation_config": validation_config and validation_config.to_settings(),
    }


def _serialize_trainer_state(arguments: Mapping[str, object]) -> bytes:
    # Serialize each argument separately, so that one that can no longer be unpickled can be passed
    # to `restore()` instead.
    return serialize_without_references(
        {name: serialize(value) for name, value in arguments.items()}
    )


def load_trainer_state(
    serialized: bytes, path: object, *, exclude: Mapping[str, object]
) -> dict[str, Any]:
    """Deserialize the trainer arguments in a `RunSpec.trainer_state`.

    Args:
        serialized: The trainer state.
        path: Path of the file with the state, for messages.
        exclude: Names of arguments that are not needed.

    Returns:
        The arguments, by name.

    Raises:
        DamagedRunError: The state cannot be unpickled here.
        ValueError: An argument refers to objects of a Ray cluster that has ended.
    """
    try:
        arguments: dict[str, Serialized] = cloudpickle.loads(serialized)
        missing = {
            name: argument.missing_references
            for name, argument in arguments.items()
            if argument.missing_references and name not in exclude
        }
        state = {
            name: arguments[name].deserialize()
            for name in arguments.keys() - missing.keys() - exclude.keys()
        }
    except Exception as error:  # damaged bytes can make pickle raise anything
        raise DamagedRunError(
            f"{path} cannot be unpickled here: {type(error).__name__}: {error}. Instead of "
            "restore(), create a trainer with the name and storage_path of the run and call fit(). "
            "It resumes from the latest checkpoint and replaces trainer.pkl"
        ) from error
    if missing:
        example = ", ".join(f"{name}=..." for name in missing)
        raise ValueError(
            f"{' and '.join(missing)} referred to objects of a Ray cluster that has ended: "
            f"{', '.join(itertools.chain(*missing.values()))}. Pass new values: "
            f"restore(path, {example})"
        )
    return state
