"""Interface between the controller and the validations of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from drawbar._process.driver_env import DriverEnvironment
from drawbar._process.serialization import Serialized, serialize
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.manifest import Validation
from drawbar.train._config.validation_config import ValidationConfig


class Validator(Protocol):
    """Runs the validation function.

    Attributes:
        max_concurrent: Maximum number of concurrent validations.
        resources: Resources of one validation.
    """

    max_concurrent: int
    resources: Mapping[str, float]

    async def run(
        self, checkpoint: Checkpoint, validation: Validation, on_started: Callable[[], None]
    ) -> Validation:
        """Run a validation and return it with its result. Cancelling this ends the function.

        Args:
            checkpoint: Checkpoint to validate.
            validation: Arguments and timeout of the validation.
            on_started: Called when the function is about to run.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ValidationTask:
    """Plain data that every validation task needs, created in the driver.

    Attributes:
        function: Serialized validation function, deserialized only in tasks.
        task_options: Options of the task, for `ray.remote`.
        task_resources: Resources of the task, by Ray's names.
        max_concurrent: Maximum number of concurrent tasks.
        env_vars: Environment variables, as for the training function.
        driver_env: Environment of the driver, as for the training function.
    """

    function: Serialized
    task_options: dict[str, object]
    task_resources: dict[str, float]
    max_concurrent: int
    env_vars: dict[str, str]
    driver_env: DriverEnvironment

    @classmethod
    def from_config(
        cls,
        config: ValidationConfig,
        environment: Mapping[str, str],
        driver_env: DriverEnvironment,
        runtime_env: Mapping[str, object] | None,
    ) -> ValidationTask:
        """Create the task from a validation config and the `runtime_env` of the workers."""
        options: dict[str, object] = {"num_cpus": 0, **config.task_options}
        if runtime_env:
            options.setdefault("runtime_env", dict(runtime_env))
        return cls(
            function=serialize(config.fn, should_share_buffers=True),
            task_options=options,
            task_resources=config.task_resources,
            max_concurrent=config.max_concurrent,
            env_vars=dict(environment),
            driver_env=driver_env,
        )
