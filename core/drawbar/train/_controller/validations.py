"""Schedule the validations of committed checkpoints.

At most `ValidationConfig(max_concurrent=)` validations run at the same time, concurrently with
training. A validation is a Ray task. With `num_workers=0` and in `testing.run_in_threads`, it is a
thread of this process.

Validations belong to the run and not to an attempt, so a restart of the workers does not affect
them. A run that finishes waits for them. A run that fails or is stopped cancels them. The manifests
of their checkpoints still mark them as pending, so they are rerun on resume.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from drawbar._records.event_stream import Emit
from drawbar._records.live_events import Notice, ValidationsPending
from drawbar._storage.manifest import Manifest, ReportedCheckpointStatus, Validation
from drawbar.train._controller.checkpoint_registry import CheckpointRegistry
from drawbar.train._worker_group.validator import Validator

_MAX_SHOWN_NAMES = 3


@dataclass(frozen=True)
class ValidationFinished:
    """Event: a validation has a result.

    Attributes:
        manifest: Manifest of the checkpoint.
        validation: The result.
    """

    manifest: Manifest
    validation: Validation


@dataclass(frozen=True)
class ValidationSaved:
    """Event: the result of a validation was saved, or could not be saved.

    Attributes:
        manifest: Manifest of the checkpoint.
        error: Why the result was not saved; None if it was.
    """

    manifest: Manifest
    error: Exception | None


ValidationEvent = ValidationFinished | ValidationSaved


class ValidationScheduler:
    """Start the validations of a run and track them until they finish.

    Create and use it on the controller's event loop.

    Args:
        validator: Runs validations; None if the trainer has no `validation_config`.
        registry: Checkpoints, to which the results are added.
        emit: Callback that publishes events.
        put_event: Puts an event on the controller's queue.
    """

    def __init__(
        self,
        validator: Validator | None,
        registry: CheckpointRegistry,
        emit: Emit,
        put_event: Callable[[ValidationEvent], None],
    ) -> None:
        self._validator = validator
        self._registry = registry
        self._emit = emit
        self._put_event = put_event
        self._semaphore = asyncio.Semaphore(validator.max_concurrent if validator else 1)
        self._running: dict[int, _RunningValidation] = {}
        self._has_changed = asyncio.Event()
        self._should_emit_status = False
        self._warned_metrics: set[str] = set()

    def resume_pending(self) -> None:
        """Start the validations that an earlier driver of this run did not finish."""
        pending = [manifest for manifest in self._registry.manifests if _is_pending(manifest)]
        if pending and self._validator is None:
            names = _join_names([manifest.name for manifest in pending])
            self._emit(
                Notice(
                    f"The validation of {names} stays pending, because this trainer has no "
                    "validation_config. Checkpoints with a pending validation are not deleted."
                )
            )
        for manifest in pending:
            self.schedule(manifest)

    def schedule(self, manifest: Manifest) -> None:
        """Schedule the validation of a checkpoint if it has a pending one."""
        if self._validator is not None and _is_pending(manifest):
            task = asyncio.create_task(self._validate(self._validator, manifest))
            self._running[manifest.index] = _RunningValidation(manifest.name, task)

    @property
    def first_pending(self) -> float:
        """Index of the first report whose checkpoint is not validated yet; infinity if none."""
        return min(self._running, default=math.inf)

    def has_running(self) -> bool:
        """Return whether any validation has not finished."""
        return bool(self._running)

    async def wait_for_all(self) -> None:
        """Wait for all validations, and emit their status."""
        self._should_emit_status = True
        while self._running:
            self._emit_status()
            await self._wait_for_change()

    async def cancel(self) -> None:
        """Cancel the running validations, and wait for those that already have a result."""
        self._should_emit_status = False
        tasks = [running.task for running in self._running.values() if not running.has_result]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        cancelled = [index for index, running in self._running.items() if not running.has_result]
        names = _join_names([self._running.pop(index).name for index in cancelled])
        while self._running:
            await self._wait_for_change()
        if cancelled:
            self._emit(
                Notice(
                    f"The validation of {names} has not finished. It restarts when the run is "
                    "resumed."
                )
            )

    async def _wait_for_change(self) -> None:
        """Wait until a result is saved."""
        self._has_changed.clear()
        await self._has_changed.wait()

    async def _validate(self, validator: Validator, manifest: Manifest) -> None:
        async with self._semaphore:
            validation = await self._run_validation(validator, manifest)
        # From here on, `cancel()` waits until the result is saved.
        self._running[manifest.index].has_result = True
        self._put_event(ValidationFinished(manifest, validation))

    async def _run_validation(self, validator: Validator, manifest: Manifest) -> Validation:
        start_time = time.monotonic()
        pending = manifest.validation
        assert pending is not None  # only checkpoints with a validation are scheduled
        resources = ", ".join(f"{name}={n:g}" for name, n in validator.resources.items())
        self._set_status(manifest, f"waiting for {resources}" if resources else "starting")
        checkpoint = self._registry.get_checkpoint(manifest)
        on_started = partial(self._set_status, manifest, "running")
        try:
            validation = await validator.run(checkpoint, pending, on_started)
        except Exception as error:  # a failed validation never ends the training
            validation = pending.with_failure(f"{type(error).__name__}: {error}")
        return msgspec.structs.replace(validation, seconds=time.monotonic() - start_time)

    def on_event(self, event: ValidationEvent) -> None:
        """Save the result of a validation, or remove a validation whose result is saved."""
        manifest = event.manifest
        match event:
            case ValidationFinished():
                names = manifest.metrics.keys() & event.validation.metrics.keys()
                self._warn_of_replaced_metrics(names)
                try:
                    validated = self._registry.add_validation(manifest, event.validation)
                except Exception as error:
                    self._on_saved(manifest, error)
                else:
                    save = self._save(manifest, validated)
                    self._running[manifest.index].task = asyncio.create_task(save)
            case ValidationSaved():
                self._on_saved(manifest, event.error)

    async def _save(self, manifest: Manifest, validated: Manifest) -> None:
        error = None
        try:
            await self._registry.save_validation(validated)
        except Exception as exception:
            error = exception
        self._put_event(ValidationSaved(manifest, error))

    def _on_saved(self, manifest: Manifest, error: Exception | None) -> None:
        del self._running[manifest.index]
        self._has_changed.set()
        try:
            self._registry.apply_retention()
        except OSError as retention_error:
            error = error or retention_error
        if error is not None:
            self._emit(Notice(f"The validation result of {manifest.name} was not saved: {error}"))

    def _warn_of_replaced_metrics(self, names: set[str]) -> None:
        """Warn of reported metrics that a validation replaces, once for each name."""
        new_names = sorted(names - self._warned_metrics)
        self._warned_metrics.update(new_names)
        if new_names:
            self._emit(
                Notice(
                    "The validation replaces reported metrics of the same name: "
                    f"{', '.join(map(repr, new_names))}. To keep both, rename the metrics that "
                    "the validation function returns."
                )
            )

    def _set_status(self, manifest: Manifest, status: str) -> None:
        self._running[manifest.index].status = status
        self._emit_status()

    def _emit_status(self) -> None:
        if self._should_emit_status:
            statuses = [f"{running.name} ({running.status})" for running in self._running.values()]
            self._emit(ValidationsPending(_join_names(statuses)))


@dataclass
class _RunningValidation:
    """Validation that has not finished.

    Attributes:
        name: Name of the checkpoint.
        task: Task that runs it.
        status: Status for the user.
        has_result: Whether it has a result, which is being saved.
    """

    name: str
    task: asyncio.Task[None]
    status: str = "queued"
    has_result: bool = False


def _is_pending(manifest: Manifest) -> bool:
    return manifest.status is ReportedCheckpointStatus.PENDING_VALIDATION


def _join_names(names: list[str]) -> str:
    more = len(names) - _MAX_SHOWN_NAMES
    return ", ".join(names[:_MAX_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
