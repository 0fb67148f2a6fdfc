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

from drawbar.train._controller.kept import KeptCheckpoints
from drawbar.train._group.validators import Validator
from drawbar.train._history.events import Notice, WaitsForValidations
from drawbar.train._history.stream import Emit
from drawbar.train._storage.manifest import Manifest, ReportedCheckpointStatus, Validation

_SHOWN = 3


class Validations:
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
        kept: KeptCheckpoints,
        emit: Emit,
        ended: Callable[[], None],
    ) -> None:
        self._validator = validator
        self._kept = kept
        self._emit = emit
        self._on_end = ended
        self._turn = asyncio.Semaphore(validator.max_in_flight if validator else 1)
        self._in_flight: dict[int, _InFlight] = {}
        self._settling = False
        self._said_replaced: set[str] = set()

    def resume(self) -> None:
        """Begin what an earlier driver of this run has left."""
        left = [manifest for manifest in self._kept.all if _is_pending(manifest)]
        if left and self._validator is None:
            names = _listed([each.name for each in left])
            self._emit(
                Notice(
                    "this trainer has no validation_config; the validation stays pending of "
                    f"{names}, which is not deleted"
                )
            )
        for manifest in left:
            self.begin(manifest)

    def begin(self, manifest: Manifest) -> None:
        """Validate a checkpoint when its turn comes, if that was asked for."""
        if self._validator is not None and _is_pending(manifest):
            task = asyncio.create_task(self._validate(self._validator, manifest))
            self._in_flight[manifest.index] = _InFlight(manifest.name, task)

    def pending(self, before: int) -> bool:
        """Whether a checkpoint of a report before this one is still to be validated."""
        return any(index < before for index in self._in_flight)

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    async def settle(self) -> None:
        """Wait for all of them, and say for which."""
        self._settling = True
        while self._in_flight:
            self._show()
            tasks = [each.task for each in self._in_flight.values()]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """End those that still run."""
        self._settling = False
        in_flight = list(self._in_flight.values())
        left = [each for each in in_flight if not each.has_ended]
        # Those whose outcome is there already are let be, and waited for below.
        for each in left:
            each.task.cancel()
        if in_flight:
            await asyncio.wait([each.task for each in in_flight])
        if left:
            names = _listed([each.name for each in left])
            self._emit(
                Notice(
                    f"the validation of {names} has not ended; it starts again when the run is "
                    "resumed"
                )
            )

    async def _validate(self, validator: Validator, manifest: Manifest) -> None:
        try:
            async with self._turn:
                validation = await self._outcome(validator, manifest)
            # From here on its outcome exists: whoever closes now waits for it to be kept and does
            # not cancel it.
            self._in_flight[manifest.index].has_ended = True
            await self._keep(manifest, validation)
        finally:
            del self._in_flight[manifest.index]
        self._on_end()

    async def _outcome(self, validator: Validator, manifest: Manifest) -> Validation:
        began = time.monotonic()
        asked = manifest.validation
        assert asked is not None  # only such checkpoints are validated
        waits = ", ".join(f"{name}={n:g}" for name, n in validator.resources.items())
        self._stands(manifest, f"waits for {waits}" if waits else "starts")
        checkpoint = self._kept.checkpoint(manifest)
        started = partial(self._stands, manifest, "runs")
        try:
            validation = await validator.run(checkpoint, asked, started)
        except Exception as error:  # whatever it is, the training goes on
            validation = asked.failed(f"{type(error).__name__}: {error}")
        return msgspec.structs.replace(validation, seconds=time.monotonic() - began)

    async def _keep(self, manifest: Manifest, validation: Validation) -> None:
        self._say_replaced(manifest.metrics.keys() & validation.metrics.keys())
        try:
            await self._kept.keep_validation(manifest, validation)
        except Exception as error:
            self._emit(Notice(f"the validation of {manifest.name} is not kept: {error}"))

    def _say_replaced(self, names: set[str]) -> None:
        """Say once of each name that what was reported by it does not stand any more."""
        new = sorted(names - self._said_replaced)
        self._said_replaced.update(new)
        if new:
            self._emit(
                Notice(
                    f"the validations return {', '.join(map(repr, new))}, which report() gave too: "
                    "the validation's takes its place in the checkpoint and in the result; return "
                    "it by another name to have both"
                )
            )

    def _stands(self, manifest: Manifest, where: str) -> None:
        self._in_flight[manifest.index].stands = where
        self._show()

    def _show(self) -> None:
        if self._settling:
            each = [f"{each.name} ({each.stands})" for each in self._in_flight.values()]
            self._emit(WaitsForValidations(_listed(each)))


@dataclass
class _InFlight:
    """One validation, and where it stands in words. `has_ended`: it is about to be kept."""

    name: str
    task: asyncio.Task[None]
    stands: str = "queued"
    has_ended: bool = False


def _is_pending(manifest: Manifest) -> bool:
    return manifest.status is ReportedCheckpointStatus.PENDING_VALIDATION


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
