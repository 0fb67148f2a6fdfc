"""Run validations in Ray tasks or in threads."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from drawbar._base.metrics import normalize
from drawbar._process.codec import Codec, ProtocolError
from drawbar._process.failure import format_validation_error
from drawbar._process.training_thread import AttemptInterrupted, InterruptScope
from drawbar._process.worker_env import get_runtime_env_vars, preserve_environment
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.manifest import Validation
from drawbar.train._config.validation_config import ValidationConfig, ValidationFn
from drawbar.train._worker_group.validator import ValidationTask

VALIDATIONS = Codec[Validation](Validation)


def run_validation_task(
    task: ValidationTask, checkpoint: Checkpoint, validation: Validation
) -> Iterator[bytes]:
    """Yield no bytes when the task starts, and then the encoded result of the validation."""
    yield b""
    yield VALIDATIONS.encode(_run_task(task, checkpoint, validation))


def _run_task(task: ValidationTask, checkpoint: Checkpoint, validation: Validation) -> Validation:
    """Call the function in the driver's environment, and restore the process afterwards."""
    if checkpoint.is_local and not Path(checkpoint.path).is_dir():
        return validation.with_failure(
            f"node {os.uname().nodename} cannot access {checkpoint.path}. Set "
            "RunConfig.storage_path to a directory that all nodes share, or to an object store"
        )
    with preserve_environment(), task.driver_env.apply():
        os.environ.update({**task.env_vars, **get_runtime_env_vars()})
        # Ray retries the task only if it sees the exception.
        should_raise = bool(task.task_options.get("retry_exceptions"))
        return _call_validation_fn(
            task.function.deserialize, checkpoint, validation, should_raise=should_raise
        )


class RayValidator:
    """Runs each validation as a Ray task."""

    def __init__(self, task: ValidationTask) -> None:
        import ray  # not at the top: runs without Ray import this module, too

        self.max_concurrent = task.max_concurrent
        self.resources: Mapping[str, float] = task.task_resources
        remote: Any = ray.remote  # its stub does not know streaming tasks
        self._run_task = remote(num_returns="streaming", **task.task_options)(run_validation_task)
        self._task = ray.put(task)
        retries = task.task_options.get("max_retries")
        tries = f", {retries + 1} times" if isinstance(retries, int) and retries else ""
        # Ray reports nothing more specific, and no sentinel watches a process that Ray reuses.
        self._death_message = (
            f"the process of its task died{tries}: by SIGKILL (from the kernel's OOM killer, for "
            "example), by a crash in C code, or by os._exit. Check Ray's worker logs on its node "
            'for a crash, or set ValidationConfig(ray_remote_kwargs={"memory": ...}) to add memory'
        )

    async def run(
        self, checkpoint: Checkpoint, validation: Validation, on_started: Callable[[], None]
    ) -> Validation:
        """Run a validation as a task whose timeout starts when the task starts."""
        import ray
        from ray.exceptions import RayError, RayTaskError, WorkerCrashedError

        stream = self._run_task.remote(self._task, checkpoint, validation)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                async for reference in stream:
                    result: bytes = await reference
                    if result:
                        return VALIDATIONS.decode(result)
                    on_started()
                    limit.reschedule(_compute_deadline(validation))
            return validation.with_failure("its task ended without a result")
        except WorkerCrashedError:
            return validation.with_failure(self._death_message)
        except (RayError, ProtocolError) as error:
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


def _compute_deadline(validation: Validation) -> float | None:
    if validation.timeout_s is None:
        return None
    return asyncio.get_running_loop().time() + validation.timeout_s


class ThreadValidator:
    """Runs each validation in a thread of this process, which ends with the process."""

    def __init__(self, config: ValidationConfig) -> None:
        self.max_concurrent = config.max_concurrent
        self.resources: Mapping[str, float] = {}
        self._function = config.fn

    async def run(
        self, checkpoint: Checkpoint, validation: Validation, on_started: Callable[[], None]
    ) -> Validation:
        """Run a validation in a thread. After its timeout it is interrupted but not awaited."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Validation] = loop.create_future()

        def set_result(result: Validation) -> None:
            if not ended.done():
                ended.set_result(result)

        user_code = InterruptScope()

        def run_in_thread() -> None:
            with contextlib.suppress(RuntimeError, AttemptInterrupted):  # the loop may be closed
                user_code.begin()
                result = _call_validation_fn(lambda: self._function, checkpoint, validation)
                user_code.end()
                loop.call_soon_threadsafe(set_result, result)

        # A daemon thread: a function in C code cannot be interrupted and must not block the exit.
        threading.Thread(target=run_in_thread, name="validation", daemon=True).start()
        on_started()
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
    """Call the validation function and return its metrics or its failure."""
    try:
        function = load()
        # Copies: the function must not be able to change the arguments in the manifest.
        metrics = function(checkpoint, **copy.deepcopy(validation.fn_kwargs))
    except BaseException as error:
        # `sys.exit()` in the function is a failure too: it must not end a process that Ray reuses.
        if should_raise:
            raise
        return validation.with_failure(format_validation_error(error))
    try:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"the validation function must return a dict, found {metrics!r}")
        return validation.with_success(normalize(metrics))
    except Exception as error:  # caused by a value, not by a line of the function
        return validation.with_failure(
            f"{type(error).__name__}: {error}{_format_definition(function)}"
        )


def _format_definition(function: object) -> str:
    """Return where a function is defined, if it has code."""
    code = getattr(inspect.unwrap(cast("Callable[..., object]", function)), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno}, {code.co_name})" if code else ""
