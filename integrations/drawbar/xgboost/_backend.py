"""XGBoostConfig and the setup of XGBoost's tracker and communicator.

The tracker runs next to the controller. It binds its port before it publishes it, and so does each
worker, so no port is guessed. Tasks are named by rank and sorted by name, so that XGBoost's ranks
equal the run's ranks.

A failed worker closes its connections, and the others get an error from the collective in which
they are blocked. They then disconnect from the tracker. It does not run on rank 0, because workers
without a tracker would retry for ten seconds and could not be reused for the next attempt.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from drawbar._boosting.backend import BoostingConfig
from drawbar.train import get_context
from drawbar.train.backend import (
    Backend,
    BackendWorkerGroup,
    get_node_address,
    make_import_error,
    parse_duration,
)

try:
    from xgboost import collective
except ImportError as error:
    raise make_import_error("xgboost", extra="xgboost") from error

from xgboost.core import XGBoostError
from xgboost.tracker import RabitTracker

from drawbar.xgboost._compat import filter_log

_tracker_args: dict[str, Any] = {}
"""Address of the tracker, as arguments of this worker's communicator."""

_RANK_MESSAGE = re.compile(rb"Task \d+ got rank \d+")


@dataclass(frozen=True)
class XGBoostConfig(BoostingConfig):
    """Configure the communicator between the workers.

    Args:
        xgboost_communicator: Must be "rabit".
        timeout_s: Time for which a collective waits for other ranks: seconds or a timedelta.
            XGBoost uses whole seconds.
        import_sklearn: Whether a worker imports scikit-learn with XGBoost, which takes about a
            second. Estimators such as `XGBClassifier` need it. Default: only if user code runs on
            the workers, such as a training function, a callback, or a metric.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.

    Example:
        ```python
        trainer = XGBoostTrainer(train_func, xgboost_config=XGBoostConfig(timeout_s=600))
        ```
    """

    library_module: ClassVar[str] = "xgboost"
    min_version: ClassVar[str] = "3.1"  # keeps the names of categories in the model

    xgboost_communicator: Literal["rabit"] = "rabit"
    timeout_s: Annotated[float | timedelta, parse_duration] = 1800

    @property
    def backend_cls(self) -> type[Backend]:
        """Class of the backend."""
        return XGBoostBackend

    @contextlib.contextmanager
    def train_func_context(self) -> Iterator[None]:
        """Initialize the communicator for the training function and finalize it afterwards."""
        context = get_context()
        if context.get_world_size() == 1:
            yield
            return
        assert not isinstance(self.timeout_s, timedelta)  # converted in __post_init__
        task = f"{context.get_world_rank():08d}"
        communicator = collective.CommunicatorContext(
            **_tracker_args, dmlc_task_id=task, dmlc_timeout=math.ceil(self.timeout_s)
        )
        with filter_log(_is_not_rank_message):
            communicator.__enter__()
        try:
            yield
        except BaseException:
            with contextlib.suppress(XGBoostError):  # the first error is raised
                collective.finalize()
            raise
        collective.finalize()


class XGBoostBackend(Backend):
    """Backend of XGBoostTrainer. It runs the tracker; worker processes are reused.

    Example:
        ```python
        @dataclass(frozen=True)
        class MyConfig(BackendConfig):
            @property
            def backend_cls(self):
                return drawbar.xgboost.XGBoostBackend
        ```
    """

    can_reuse_processes = True

    def __init__(self) -> None:
        self._tracker: RabitTracker | None = None

    def on_start(self, worker_group: BackendWorkerGroup, backend_config: XGBoostConfig) -> None:
        """Start a tracker and send its address to every worker."""
        self._stop_tracker()
        if len(worker_group) == 1:
            return
        self._tracker = RabitTracker(
            n_workers=len(worker_group), host_ip=get_node_address(), sortby="task"
        )
        self._tracker.start()
        worker_group.execute(_set_tracker_args, self._tracker.worker_args())

    def on_shutdown(self, worker_group: BackendWorkerGroup, backend_config: XGBoostConfig) -> None:
        """Stop the tracker."""
        self._stop_tracker()

    def _stop_tracker(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(XGBoostError):  # it was still waiting for dead workers
                tracker.free()


def _is_not_rank_message(message: bytes) -> bool:
    """Return False for "Task 00000000 got rank 0", which XGBoost logs at any verbosity."""
    return not _RANK_MESSAGE.search(message)


def _set_tracker_args(arguments: Mapping[str, object]) -> None:
    _tracker_args.clear()
    _tracker_args.update(arguments)
