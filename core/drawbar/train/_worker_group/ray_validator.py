"""Run validations as Ray tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, WorkerCrashedError

from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.manifest import Validation
from drawbar.train._worker_group.validators import (
    VALIDATIONS,
    ValidationTask,
    run_validation_task,
)


class RayValidator:
    """Runs each validation as a Ray task."""

    def __init__(self, task: ValidationTask) -> None:
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


def _compute_deadline(validation: Validation) -> float | None:
    if validation.timeout_s is None:
        return None
    return asyncio.get_running_loop().time() + validation.timeout_s
