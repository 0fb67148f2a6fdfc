"""How XGBoost's workers meet: a tracker beside the controller, a communicator on each worker.

The tracker binds its port before it tells it, and so does each worker, so no port is guessed. Tasks
are named by rank and sorted by name, so XGBoost's ranks are those of the run.

A worker that fails closes its connections, and the others get an error from the collective that
they stand in. They then say goodbye to the tracker, which is why it does not live on rank 0:
whoever finds no tracker tries again for ten seconds, and would not be kept for the next attempt.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from drawbar._boosting import BoostingConfig
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

from xgboost.core import _LIB, XGBoostError, _log_callback
from xgboost.tracker import RabitTracker

_tracker_args: dict[str, Any] = {}
"""Where the tracker of this worker's run is."""

_RANK_MESSAGE = re.compile(rb"Task \d+ got rank \d+")


@dataclass(frozen=True)
class XGBoostConfig(BoostingConfig):
    """How the workers' communicator is made that is up when the training function starts.

    Args:
        xgboost_communicator: Only "rabit" is known.
        timeout_s: How long a collective waits for the other ranks: seconds, or a timedelta; XGBoost
            counts whole seconds.
        import_sklearn: Whether a worker imports scikit-learn with XGBoost, which takes about a
            second and is what `XGBClassifier` and the like need. Default: only where code of
            yours runs, as a training function, a callback or a metric.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
    """

    library_module: ClassVar[str] = "xgboost"
    min_version: ClassVar[str] = "3.1"  # keeps the names of categories in the model

    xgboost_communicator: str = "rabit"
    timeout_s: float | timedelta = 1800

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.xgboost_communicator != "rabit":
            raise ValueError(
                "XGBoostConfig.xgboost_communicator must be 'rabit', "
                f"found {self.xgboost_communicator!r}"
            )
        seconds = parse_duration("XGBoostConfig.timeout_s", self.timeout_s)
        object.__setattr__(self, "timeout_s", seconds)

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with the controller's part."""
        return XGBoostBackend

    def train_func_context(self) -> AbstractContextManager[None]:
        """Join the communicator before the training function, leave it after it."""
        return _communicator(self)


class XGBoostBackend(Backend):
    """Keeps the tracker; a worker's process can join one after another."""

    can_reuse_processes = True

    def __init__(self) -> None:
        self._tracker: RabitTracker | None = None

    def on_start(self, worker_group: BackendWorkerGroup, backend_config: XGBoostConfig) -> None:
        """Start a tracker and tell every worker where it is."""
        self._stop_tracker()
        if len(worker_group) == 1:
            return
        self._tracker = RabitTracker(
            n_workers=len(worker_group), host_ip=get_node_address(), sortby="task"
        )
        self._tracker.start()
        worker_group.execute(_set_tracker_args, self._tracker.worker_args())

    def on_shutdown(self, worker_group: BackendWorkerGroup, backend_config: XGBoostConfig) -> None:
        """End the tracker."""
        self._stop_tracker()

    def _stop_tracker(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(XGBoostError):  # it still waited for workers that are gone
                tracker.free()


@contextlib.contextmanager
def _without_rank_message() -> Iterator[None]:
    """Drop the line "Task 00000000 got rank 0" that XGBoost logs at any verbosity.

    Other messages are logged as usual.
    """

    def log(message: bytes) -> None:
        if not _RANK_MESSAGE.search(message):
            _log_callback(message)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(log)
    _LIB.XGBRegisterLogCallback(callback)  # of this thread
    try:
        yield
    finally:
        _LIB.XGBRegisterLogCallback(_LIB.callback)  # the one that `import xgboost` registers


def _set_tracker_args(arguments: Mapping[str, object]) -> None:
    _tracker_args.clear()
    _tracker_args.update(arguments)


@contextlib.contextmanager
def _communicator(config: XGBoostConfig) -> Iterator[None]:
    context = get_context()
    if context.get_world_size() == 1:
        yield
        return
    assert not isinstance(config.timeout_s, timedelta)  # seconds, since it was checked
    task = f"{context.get_world_rank():08d}"
    communicator = collective.CommunicatorContext(
        **_tracker_args, dmlc_task_id=task, dmlc_timeout=math.ceil(config.timeout_s)
    )
    with _without_rank_message():
        communicator.__enter__()
    try:
        yield
    except BaseException:
        with contextlib.suppress(XGBoostError):  # what failed first is what counts
            collective.finalize()
        raise
    collective.finalize()
