"""Running the validations of a run: beside the training, a bounded number at a time.

Each is a Ray task; with `num_workers=0`, and in the worlds of `testing`, a thread of this process.
They belong to the run and not to an attempt: a restart of the workers does not touch them. A run
that finishes waits for them. One that fails or is stopped ends what still runs; the manifests say
that it is pending, so the resumed run starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from drawbar.train._carry import Carried, carry
from drawbar.train._checkpoint import Checkpoint
from drawbar.train._commit import Committer
from drawbar.train._console import Console
from drawbar.train._environment import by_runtime_env
from drawbar.train._failure import describe_validation_failure
from drawbar.train._interrupt import AttemptInterrupted, Interruptible
from drawbar.train._local import as_before
from drawbar.train._manifest import Manifest
from drawbar.train._metrics import normalise
from drawbar.train._surroundings import Surroundings
from drawbar.train._validation import (
    ReportedCheckpointStatus,
    Validation,
    ValidationConfig,
    ValidationFn,
)

_SHOWN = 3


class Validator(Protocol):
    """Runs the validation function somewhere.

    Attributes:
        max_in_flight: How many at the same time.
        resources: That each of them takes.
    """

    max_in_flight: int
    resources: Mapping[str, float]

    async def run(
        self, checkpoint: Checkpoint, validation: Validation, started: Callable[[], None]
    ) -> Validation:
        """Give what came of a validation. If this is cancelled, the function is ended.

        `started` is called when the function is about to run.
        """
        ...


class Validations:
    """The validations of a run that have not ended. Make it on the event loop.

    Args:
        validator: Runs them; None if the trainer has no `validation_config`.
        commits: Has the checkpoints, and keeps what comes of their validations.
        console: Is told.
        ended: Called on the event loop after each one that has ended.
    """

    def __init__(
        self,
        validator: Validator | None,
        commits: Committer,
        console: Console,
        ended: Callable[[], None],
    ) -> None:
        self._validator = validator
        self._commits = commits
        self._console = console
        self._on_end = ended
        self._turn = asyncio.Semaphore(validator.max_in_flight if validator else 1)
        self._in_flight: dict[int, _InFlight] = {}
        self._settling = False

    def resume(self) -> None:
        """Begin what an earlier driver of this run has left."""
        left = [manifest for manifest in self._commits.kept if _is_pending(manifest)]
        if left and self._validator is None:
            self._console.notice(
                "this trainer has no validation_config; the validation stays pending of "
                f"{_listed([each.name for each in left])}, which is not deleted"
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
        """Wait for all of them; the console shows for which."""
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
        for each in left:
            each.task.cancel()
        if in_flight:
            await asyncio.wait([each.task for each in in_flight])
        if left:
            self._console.notice(
                f"the validation of {_listed([each.name for each in left])} has not ended; it "
                "starts again when the run is resumed"
            )

    async def _validate(self, validator: Validator, manifest: Manifest) -> None:
        try:
            async with self._turn:
                validation = await self._outcome(validator, manifest)
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
        checkpoint = self._commits.checkpoint(manifest)
        started = partial(self._stands, manifest, "runs")
        try:
            validation = await validator.run(checkpoint, asked, started)
        except Exception as error:  # whatever it is, the training goes on
            validation = asked.failed(f"{type(error).__name__}: {error}")
        return msgspec.structs.replace(validation, seconds=time.monotonic() - began)

    async def _keep(self, manifest: Manifest, validation: Validation) -> None:
        try:
            await self._commits.keep_validation(manifest, validation)
        except Exception as error:
            self._console.notice(f"the validation of {manifest.name} is not kept: {error}")
        if validation.status is ReportedCheckpointStatus.VALIDATED:
            self._console.validated(manifest.name, validation.metrics, validation.seconds)
        else:
            self._console.notice(
                f"the validation of {manifest.name} failed, the training goes on: "
                f"{validation.error}"
            )

    def _stands(self, manifest: Manifest, where: str) -> None:
        self._in_flight[manifest.index].stands = where
        self._show()

    def _show(self) -> None:
        if self._settling:
            each = [f"{each.name} ({each.stands})" for each in self._in_flight.values()]
            self._console.state("waiting for validations", _listed(each))


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


# -- where it runs


class RayValidator:
    """Runs each validation as a Ray task."""

    def __init__(self, work: ValidationWork) -> None:
        self.max_in_flight = work.max_in_flight
        self.resources: Mapping[str, float] = work.resources
        remote: Any = ray.remote  # its stub does not know streaming tasks
        self._task = remote(num_returns="streaming", **work.options)(validate_checkpoint)
        self._work = ray.put(work)

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
                    limit.reschedule(_deadline(validation))
            return validation.failed("its task ended without a word")
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            return validation.failed(f"{type(cause).__name__}: {cause}")
        except TimeoutError:
            if not limit.expired():
                raise
            ray.cancel(stream, force=True)
            return validation.timed_out()
        except asyncio.CancelledError:
            ray.cancel(stream, force=True)
            raise


@dataclass(frozen=True, kw_only=True)
class ValidationWork:
    """What every task does, and where: plain data, made in the driver.

    Attributes:
        function: The packed validation function, unpacked by tasks only.
        options: Of the task, for `ray.remote`.
        resources: That the task takes, by Ray's names.
        max_in_flight: How many tasks run at the same time.
        environment, surroundings: The driver's, as the training function gets them.
    """

    function: Carried
    options: dict[str, Any]
    resources: dict[str, float]
    max_in_flight: int
    environment: dict[str, str]
    surroundings: Surroundings

    @classmethod
    def of(
        cls,
        config: ValidationConfig,
        environment: Mapping[str, str],
        surroundings: Surroundings,
        runtime_env: Mapping[str, Any] | None,
    ) -> ValidationWork:
        """Make it of what the trainer was given; `runtime_env` is that of the workers."""
        options: dict[str, Any] = {"num_cpus": 0, **config.options}
        if runtime_env:
            options.setdefault("runtime_env", dict(runtime_env))
        return cls(
            function=carry(config.fn, shares=True),
            options=options,
            resources=config.resources,
            max_in_flight=config.max_in_flight,
            environment=dict(environment),
            surroundings=surroundings,
        )

    def do(self, checkpoint: Checkpoint, validation: Validation) -> Validation:
        """Call the function as the training function is called; leave the process as it was."""
        if checkpoint.filesystem is None and not Path(checkpoint.path).is_dir():
            return validation.failed(
                f"node {os.uname().nodename} does not see {checkpoint.path}. Set "
                "RunConfig.storage_path to a folder that all nodes share, or to an object store"
            )
        with as_before(), self.surroundings.entered():
            os.environ.update({**self.environment, **by_runtime_env()})
            tries_again = bool(self.options.get("retry_exceptions"))  # Ray does, if it sees them
            return _call(self.function.unpack, checkpoint, validation, raises=tries_again)


def validate_checkpoint(
    work: ValidationWork, checkpoint: Checkpoint, validation: Validation
) -> Iterator[Any]:
    """Say that the task runs, by None, and then what came of it."""
    yield None
    yield work.do(checkpoint, validation)


class ThreadValidator:
    """Runs each validation in a thread of this process, which ends with it."""

    def __init__(self, config: ValidationConfig) -> None:
        self.max_in_flight = config.max_in_flight
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

        user_code = Interruptible()

        def work() -> None:
            with contextlib.suppress(RuntimeError, AttemptInterrupted):  # nobody waits any more
                user_code.begin()
                found = _call(lambda: self._function, checkpoint, validation)
                user_code.end()
                loop.call_soon_threadsafe(tell, found)

        threading.Thread(target=work, name="validation", daemon=True).start()
        started()
        try:
            return await asyncio.wait_for(ended, validation.timeout_s)
        except TimeoutError:
            user_code.interrupt()
            return validation.timed_out()
        except asyncio.CancelledError:
            user_code.interrupt()
            raise


def _call(
    load: Callable[[], ValidationFn],
    checkpoint: Checkpoint,
    validation: Validation,
    *,
    raises: bool = False,
) -> Validation:
    """Call the function; gives what came of it, whatever that is."""
    try:
        metrics = load()(checkpoint, **copy.deepcopy(validation.fn_kwargs))
        if not isinstance(metrics, Mapping):
            raise TypeError(f"the validation function must return a dict, found {metrics!r}")
        return validation.succeeded(normalise(metrics))
    except BaseException as error:
        if raises:
            raise
        return validation.failed(describe_validation_failure(error))


def _deadline(validation: Validation) -> float | None:
    if validation.timeout_s is None:
        return None
    return asyncio.get_running_loop().time() + validation.timeout_s
