"""Running the validations of a run: beside the training, a bounded number at a time.

Each is a Ray task; with `num_workers=0`, and in the worlds of `testing`, a thread of this process.
They belong to the run and not to an attempt: a restart of the workers does not touch them. A run
that finishes waits for them. One that fails or is stopped ends what still runs; the manifests say
that it is pending, so the resumed run starts it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from drawbar.train._controller.checkpoint_registry import CheckpointRegistry
from drawbar.train._history.event_stream import Emit
from drawbar.train._history.events import Notice, ValidationsPending
from drawbar.train._storage.manifest import Manifest, ReportedCheckpointStatus, Validation
from drawbar.train._worker_group.validators import Validator

_SHOWN = 3


class ValidationScheduler:
    """The validations of a run that have not ended. Make it on the event loop.

    Args:
        validator: Runs them; None if the trainer has no `validation_config`.
        kept: Has the checkpoints, and keeps what comes of their validations.
        emit: Tells events.
        ended: Called on the event loop after each one that has ended.
    """

    def __init__(
        self,
        validator: Validator | None,
        registry: CheckpointRegistry,
        emit: Emit,
        ended: Callable[[], None],
    ) -> None:
        self._validator = validator
        self._kept = registry
        self._emit = emit
        self._on_end = ended
        self._semaphore = asyncio.Semaphore(validator.max_concurrent if validator else 1)
        self._running: dict[int, _RunningValidation] = {}
        self._is_waiting = False
        self._warned_metrics: set[str] = set()

    def resume_pending(self) -> None:
        """Begin what an earlier driver of this run has left."""
        left = [manifest for manifest in self._kept.manifests if _is_pending(manifest)]
        if left and self._validator is None:
            names = _join_names([each.name for each in left])
            self._emit(
                Notice(
                    "this trainer has no validation_config; the validation stays pending of "
                    f"{names}, which is not deleted"
                )
            )
        for manifest in left:
            self.schedule(manifest)

    def schedule(self, manifest: Manifest) -> None:
        """Validate a checkpoint when its turn comes, if that was asked for."""
        if self._validator is not None and _is_pending(manifest):
            task = asyncio.create_task(self._validate(self._validator, manifest))
            self._running[manifest.index] = _RunningValidation(manifest.name, task)

    def has_pending(self, before: int) -> bool:
        """Whether a checkpoint of a report before this one is still to be validated."""
        return any(index < before for index in self._running)

    def has_running(self) -> bool:
        return bool(self._running)

    async def wait_for_all(self) -> None:
        """Wait for all of them, and say for which."""
        self._is_waiting = True
        while self._running:
            self._emit_status()
            tasks = [each.task for each in self._running.values()]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    async def cancel(self) -> None:
        """End those that still run."""
        self._is_waiting = False
        in_flight = list(self._running.values())
        left = [each for each in in_flight if not each.has_result]
        # Those whose outcome is there already are let be, and waited for below.
        for each in left:
            each.task.cancel()
        if in_flight:
            await asyncio.wait([each.task for each in in_flight])
        if left:
            names = _join_names([each.name for each in left])
            self._emit(
                Notice(
                    f"the validation of {names} has not ended; it starts again when the run is "
                    "resumed"
                )
            )

    async def _validate(self, validator: Validator, manifest: Manifest) -> None:
        try:
            async with self._semaphore:
                validation = await self._run_validation(validator, manifest)
            # From here on its outcome exists: whoever closes now waits for it to be kept and does
            # not cancel it.
            self._running[manifest.index].has_result = True
            await self._store_result(manifest, validation)
        finally:
            del self._running[manifest.index]
        self._on_end()

    async def _run_validation(self, validator: Validator, manifest: Manifest) -> Validation:
        began = time.monotonic()
        asked = manifest.validation
        assert asked is not None  # only such checkpoints are validated
        waits = ", ".join(f"{name}={n:g}" for name, n in validator.resources.items())
        self._set_status(manifest, f"waits for {waits}" if waits else "starts")
        checkpoint = self._kept.get_checkpoint(manifest)
        started = partial(self._set_status, manifest, "runs")
        try:
            validation = await validator.run(checkpoint, asked, started)
        except Exception as error:  # whatever it is, the training goes on
            validation = asked.with_failure(f"{type(error).__name__}: {error}")
        return msgspec.structs.replace(validation, seconds=time.monotonic() - began)

    async def _store_result(self, manifest: Manifest, validation: Validation) -> None:
        self._warn_of_replaced_metrics(manifest.metrics.keys() & validation.metrics.keys())
        try:
            await self._kept.add_validation(manifest, validation)
        except Exception as error:
            self._emit(Notice(f"the validation of {manifest.name} is not kept: {error}"))

    def _warn_of_replaced_metrics(self, names: set[str]) -> None:
        """Say once of each name that what was reported by it does not stand any more."""
        new = sorted(names - self._warned_metrics)
        self._warned_metrics.update(new)
        if new:
            self._emit(
                Notice(
                    f"the validations return {', '.join(map(repr, new))}, which report() gave too: "
                    "the validation's takes its place in the checkpoint and in the result; return "
                    "it by another name to have both"
                )
            )

    def _set_status(self, manifest: Manifest, where: str) -> None:
        self._running[manifest.index].status = where
        self._emit_status()

    def _emit_status(self) -> None:
        if self._is_waiting:
            each = [f"{each.name} ({each.status})" for each in self._running.values()]
            self._emit(ValidationsPending(_join_names(each)))


@dataclass
class _RunningValidation:
    """One validation, and where it stands in words. `has_ended`: it is about to be kept."""

    name: str
    task: asyncio.Task[None]
    status: str = "queued"
    has_result: bool = False


def _is_pending(manifest: Manifest) -> bool:
    return manifest.status is ReportedCheckpointStatus.PENDING_VALIDATION


def _join_names(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
