"""Running one validation: in a Ray task, or in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import ray
from ray.exceptions import RayError, RayTaskError, WorkerCrashedError

from drawbar.train._config.validation_config import ValidationConfig, ValidationFn
from drawbar.train._driver_env import DriverEnvironment
from drawbar.train._metrics import normalize
from drawbar.train._serialization import Serialized, serialize
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.manifest import Validation
from drawbar.train._worker.failure import format_validation_error
from drawbar.train._worker.interrupt import AttemptInterrupted, InterruptScope
from drawbar.train._worker.worker_env import get_runtime_env_vars, preserve_environment


class Validator(Protocol):
    """Runs the validation function somewhere.

    Attributes:
        max_in_flight: How many at the same time.
        resources: That each of them takes.
    """

    max_concurrent: int
    resources: Mapping[str, float]

    async def run(
        self, checkpoint: Checkpoint, validation: Validation, started: Callable[[], None]
    ) -> Validation:
        """Give what came of a validation. If this is cancelled, the function is ended.

        `started` is called when the function is about to run.
        """
        ...


# -- where it runs


class RayValidator:
    """Runs each validation as a Ray task."""

    def __init__(self, work: ValidationTask) -> None:
        self.max_concurrent = work.max_concurrent
        self.resources: Mapping[str, float] = work.task_resources
        remote: Any = ray.remote  # its stub does not know streaming tasks
        self._task = remote(num_returns="streaming", **work.task_options)(run_validation_task)
        self._work = ray.put(work)
        retries = work.task_options.get("max_retries")
        tries = f", {retries + 1} times" if isinstance(retries, int) and retries else ""
        # Ray says no more of it, and nothing of Drawbar's watches a process that Ray uses again.
        self._death_message = (
            f"the process of its task died{tries}: by SIGKILL, as the kernel's OOM killer sends "
            "it, by a crash in C code, or by os._exit. "
            "Ray's worker logs on its node tell a crash; for more memory, set "
            'ValidationConfig(ray_remote_kwargs={"memory": ...})'
        )

    async def run(
        self, checkpoint: Checkpoint, validation: Validation, started: Callable[[], None]
    ) -> Validation:
        """Run it as a task whose time is counted from its start."""
        stream = self._task.remote(self._work, checkpoint, validation)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                async for reference in stream:
                    ended: Validation | None = await reference
                    if ended is not None:
                        return ended
                    started()
                    limit.reschedule(_compute_deadline(validation))
            return validation.with_failure("its task ended without a word")
        except WorkerCrashedError:
            return validation.with_failure(self._death_message)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            return validation.with_failure(f"{type(cause).__name__}: {cause}")
        except TimeoutError:
            if not limit.expired():
                raise
            ray.cancel(stream, force=True)
            return validation.with_timeout()
        except asyncio.CancelledError:
            ray.cancel(stream, force=True)
            raise


@dataclass(frozen=True, kw_only=True)
class ValidationTask:
    """What every task does, and where: plain data, made in the driver.

    Attributes:
        function: The packed validation function, unpacked by tasks only.
        options: Of the task, for `ray.remote`.
        resources: That the task takes, by Ray's names.
        max_in_flight: How many tasks run at the same time.
        environment, surroundings: The driver's, as the training function gets them.
    """

    function: Serialized
    task_options: dict[str, object]
    task_resources: dict[str, float]
    max_concurrent: int
    env_vars: dict[str, str]
    surroundings: DriverEnvironment

    @classmethod
    def from_config(
        cls,
        config: ValidationConfig,
        environment: Mapping[str, str],
        surroundings: DriverEnvironment,
        runtime_env: Mapping[str, object] | None,
    ) -> ValidationTask:
        """Make it of what the trainer was given; `runtime_env` is that of the workers."""
        options: dict[str, object] = {"num_cpus": 0, **config.task_options}
        if runtime_env:
            options.setdefault("runtime_env", dict(runtime_env))
        return cls(
            function=serialize(config.fn, should_share_buffers=True),
            task_options=options,
            task_resources=config.task_resources,
            max_concurrent=config.max_concurrent,
            env_vars=dict(environment),
            surroundings=surroundings,
        )

    def run(self, checkpoint: Checkpoint, validation: Validation) -> Validation:
        """Call the function as the training function is called; leave the process as it was."""
        if checkpoint.is_local and not Path(checkpoint.path).is_dir():
            return validation.with_failure(
                f"node {os.uname().nodename} does not see {checkpoint.path}. Set "
                "RunConfig.storage_path to a folder that all nodes share, or to an object store"
            )
        with preserve_environment(), self.surroundings.apply():
            os.environ.update({**self.env_vars, **get_runtime_env_vars()})
            tries_again = bool(
                self.task_options.get("retry_exceptions")
            )  # Ray does, if it sees them
            return _call_validation_fn(
                self.function.deserialize, checkpoint, validation, should_raise=tries_again
            )


def run_validation_task(
    task: ValidationTask, checkpoint: Checkpoint, validation: Validation
) -> Iterator[Validation | None]:
    """Say that the task runs, by None, and then what came of it."""
    yield None
    yield task.run(checkpoint, validation)


class ThreadValidator:
    """Runs each validation in a thread of this process, which ends with it."""

    def __init__(self, config: ValidationConfig) -> None:
        self.max_concurrent = config.max_concurrent
        self.resources: Mapping[str, float] = {}
        self._function = config.fn

    async def run(
        self, checkpoint: Checkpoint, validation: Validation, started: Callable[[], None]
    ) -> Validation:
        """Run it in a thread. At the end of its time that is interrupted, and not waited for."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Validation] = loop.create_future()

        def tell(found: Validation) -> None:
            if not ended.done():
                ended.set_result(found)

        user_code = InterruptScope()

        def work() -> None:
            with contextlib.suppress(RuntimeError, AttemptInterrupted):  # nobody waits any more
                user_code.begin()
                found = _call_validation_fn(lambda: self._function, checkpoint, validation)
                user_code.end()
                loop.call_soon_threadsafe(tell, found)

        # A daemon: one that cannot be interrupted, in C code, must not hold the program up.
        threading.Thread(target=work, name="validation", daemon=True).start()
        started()
        try:
            return await asyncio.wait_for(ended, validation.timeout_s)
        except TimeoutError:
            user_code.interrupt()
            return validation.with_timeout()
        except asyncio.CancelledError:
            user_code.interrupt()
            raise


def _call_validation_fn(
    load: Callable[[], ValidationFn],
    checkpoint: Checkpoint,
    validation: Validation,
    *,
    should_raise: bool = False,
) -> Validation:
    """Call the function; gives what came of it, whatever that is."""
    try:
        function = load()
        # Copies: a function that changes what it is given must not change what the manifest says.
        metrics = function(checkpoint, **copy.deepcopy(validation.fn_kwargs))
    except BaseException as error:
        # A `sys.exit()` in the function too is its failure, not the end of a process that Ray uses
        # again.
        if should_raise:
            raise
        return validation.with_failure(format_validation_error(error))
    try:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"the validation function must return a dict, found {metrics!r}")
        return validation.with_success(normalize(metrics))
    except Exception as error:  # of a value, and no line of the function's has raised it
        return validation.with_failure(
            f"{type(error).__name__}: {error}{_format_definition(function)}"
        )


def _format_definition(function: object) -> str:
    """Say where a function is defined, as far as it tells."""
    code = getattr(inspect.unwrap(cast("Callable[..., object]", function)), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno}, {code.co_name})" if code else ""


def _compute_deadline(validation: Validation) -> float | None:
    if validation.timeout_s is None:
        return None
    return asyncio.get_running_loop().time() + validation.timeout_s
