"""How the workers of one framework meet: the contract for integrations.

An integration is a `BackendConfig` (what the user sets) and its `Backend` (what is done with it).
Most need no more than `train_func_context`, which runs on each worker around the training function
and may use `drawbar.train.collective` to agree on an address; it costs no round trip of its own.
The three hooks of `Backend` run in the controller, for frameworks that need something there, such
as a tracker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from drawbar.train import collective
from drawbar.train._context import current_session, report
from drawbar.train._preflight import require_package
from drawbar.train._scaling import ScalingConfig

__all__ = [
    "Backend",
    "BackendConfig",
    "WorkerGroupView",
    "align_reports",
    "collectives_called",
    "discard_checkpoint",
    "keep_data_position",
    "report_soon",
    "require_package",
    "retire_process",
]

R = TypeVar("R")


def keep_data_position(name: str, position: Callable[[], Any], *, numbered: bool = False) -> Any:
    """Put how far a source of data has been consumed into every checkpoint of this worker.

    For data loaders and shards, inside the training function. The checkpoint gets the position of
    the lowest rank that gives files, so it should be told independently of the world size: samples
    consumed by all ranks together, not by this one.

    Args:
        name: Name of the source, the same on every rank and in every attempt. A second source of
            the same name replaces the first.
        position: Gives the position as a small JSON-able value, or None for a source that is gone;
            called at each report with a checkpoint.
        numbered: Add the source's number among those of this name, in the order of the calls.

    Returns:
        The position in the checkpoint that this attempt goes on from. None if it has none, or has
        been given out in this attempt already.
    """
    session = current_session("keep_data_position")
    return session.keep_data_position(name, position, numbered=numbered)


def retire_process() -> None:
    """Have this worker's process not run another attempt, which gets a new one instead.

    For frameworks that keep state in the process and have no way to drop it. Inside the training
    function, or around it in `train_func_context`.
    """
    current_session("retire_process").retire()


def report_soon(metrics: Mapping[str, Any]) -> None:
    """Report metrics that come often, such as those of every round, without a checkpoint.

    As `drawbar.train.report(metrics)`, but if this worker has said anything within the last quarter
    of a second, the report may reach the driver that much later, along with those that follow. It
    keeps its place among all reports. So a training that fills all cores is held up four times a
    second, however often it reports.

    Raises:
        RuntimeError: Called outside a training function.
        TypeError, ValueError: A metric cannot be kept; the message names its key.
    """
    current_session("report_soon").report_metrics(metrics, may_wait=True)


def align_reports() -> None:
    """Have every rank made equally many reports, so that each rank's next one belongs together.

    A collective. A rank that has reported less often than another makes up for it by reports
    without metrics. For integrations that report a checkpoint from all ranks in a function whose
    ranks may have reported differently before, such as by a logger that only rank 0 has.
    """
    session = current_session("align_reports")
    made = collective.all_gather(session.reports_made)
    for _ in range(max(made) - session.reports_made):
        report({})


def collectives_called() -> int:
    """Give how often this rank has met the others in this attempt, by Drawbar's own collectives.

    For integrations that look at what a function has done together with other ranks.
    """
    return current_session("collectives_called").collectives_called


def discard_checkpoint(name: str) -> None:
    """Delete a committed checkpoint of this run before retention would.

    For frameworks that decide themselves which checkpoints to keep. Returns at once. The newest
    checkpoint stays, since a restart begins there, and one that is being validated; a name that is
    not there is no error.

    Args:
        name: The checkpoint's directory in the run. One rank's call is enough.
    """
    current_session("discard_checkpoint").discard_checkpoint(name)


class WorkerGroupView(Protocol):
    """The started workers, as a `Backend` sees them. Results come in rank order."""

    def __len__(self) -> int:
        """Give the number of workers."""
        ...

    def execute(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> list[R]:
        """Run a function on every worker and wait for all results."""
        ...

    def execute_async(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function on every worker; gives object references."""
        ...

    def execute_single(self, rank: int, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run a function on one worker and wait for its result."""
        ...

    def execute_single_async(
        self, rank: int, function: Callable[..., R], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function on one worker; gives an object reference."""
        ...


class Backend:
    """What the controller does for a framework. All hooks do nothing unless overridden.

    A hook that raises fails the start of the workers; `on_shutdown` runs also after a failure, and
    what it raises is logged.
    """

    share_cuda_visible_devices: bool = False
    """Whether each worker sees all GPUs that this run has on its node, rather than its own only."""

    reentrant: bool = False
    """Whether a process whose attempt has ended can be set up again, with another world size."""

    def on_start(self, worker_group: WorkerGroupView, backend_config: Any) -> None:
        """Run when all workers are up and have their ranks, before anything of the user's runs."""

    def on_training_start(self, worker_group: WorkerGroupView, backend_config: Any) -> None:
        """Run right after `on_start`, when its work is done on every worker."""

    def on_shutdown(self, worker_group: WorkerGroupView, backend_config: Any) -> None:
        """Run when the attempt is over, while the workers that did not fail still live."""


class BackendConfig:
    """What the user sets for a framework. Subclass it as a frozen dataclass."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with the controller's part."""
        return _PlainBackend

    @property
    def process_setup(self) -> Callable[[], object] | None:
        """What each worker's process does as soon as it is up, such as an import that takes long.

        It is pickled and knows nothing of the other workers, who need not be up yet. A process that
        is kept for another attempt does not do it again; one whose threads are the workers does not
        do it at all. What it raises fails the start of the workers. Default: None, nothing.
        """
        return None

    def preflight(self, scaling_config: ScalingConfig) -> None:
        """Check packages and arguments in the driver, before a process starts.

        Raises:
            ImportError, ValueError, TypeError: The run cannot work as configured.
        """

    def train_func_context(self) -> AbstractContextManager[None]:
        """Wrap the training function on each worker: set the framework up, take it down.

        `get_context()`, the environment and `drawbar.train.collective` work inside. It is left also
        when the function raised or was interrupted, and must not wait for other ranks then.
        """
        return nullcontext()


class _PlainBackend(Backend):
    """No framework: the function alone."""

    reentrant = True
