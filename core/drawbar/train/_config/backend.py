"""How the workers of one framework meet: what an integration implements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, Protocol, TypeVar

from drawbar.train._config.argument_errors import ArgumentErrors
from drawbar.train._config.scaling_config import ScalingConfig

P = ParamSpec("P")
R = TypeVar("R")


TrainFunction = Callable[[], Any] | Callable[[dict[str, Any]], Any]
"""A training function: of no argument, or of the `train_loop_config`."""


class BackendWorkerGroup(Protocol):
    """The started workers, as a `Backend` sees them. Results come in rank order."""

    def __len__(self) -> int:
        """Give the number of workers."""
        ...

    def execute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a function on every worker and wait for all results."""
        ...

    def execute_async(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[Any]:
        """Run a function on every worker; gives object references."""
        ...

    def execute_single(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a function on one worker and wait for its result."""
        ...

    def execute_single_async(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """Run a function on one worker; gives an object reference."""
        ...


class LauncherStore(Protocol):
    """Where the processes that a launcher has started tell each other small things."""

    def set(self, key: str, value: str) -> object:
        """Put a value there, for all of them."""
        ...

    def get(self, key: str) -> bytes:
        """Give a value, as soon as one of them has put it there."""
        ...


class Backend:
    """What the controller does for a framework. All hooks do nothing unless overridden.

    A hook that raises fails the start of the workers; `on_shutdown` runs also after a failure, and
    what it raises is logged.
    """

    share_cuda_visible_devices: bool = False
    """Whether each worker sees all GPUs that this run has on its node, rather than its own only."""

    can_reuse_processes: bool = False
    """Whether a process whose attempt has ended can be set up again, with another world size."""

    def on_start(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        """Run when all workers are up and have their ranks, before anything of the user's runs."""

    def on_training_start(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        """Run right after `on_start`, when its work is done on every worker."""

    def on_shutdown(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        """Run when the attempt is over, while the workers that did not fail still live."""


class BackendConfig(ArgumentErrors):
    """What the user sets for a framework. Subclass it as a frozen dataclass."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with the controller's part."""
        return _NoOpBackend

    @property
    def process_setup_hook(self) -> Callable[[], object] | None:
        """What each worker's process does as soon as it is up, such as an import that takes long.

        It is pickled and knows nothing of the other workers, who need not be up yet. A process that
        is kept for another attempt does not do it again; one whose threads are the workers does not
        do it at all. What it raises fails the start of the workers. Default: None, nothing.
        """
        return None

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check packages and arguments in the driver, before a process starts.

        Raises:
            ImportError, ValueError, TypeError: The run cannot work as configured.
        """

    def get_launcher_store(self) -> LauncherStore | None:
        """Give the store of the launcher that has started this process as one of several.

        With `num_workers=0` these are then the ranks of one run. They have RANK, WORLD_SIZE,
        LOCAL_RANK and LOCAL_WORLD_SIZE in their environments. Default: None, no launcher.
        """
        return None

    def train_func_context(self) -> AbstractContextManager[None]:
        """Wrap the training function on each worker: set the framework up, take it down.

        `get_context()`, the environment and `drawbar.train.collective` work inside. It is left also
        when the function raised or was interrupted, and must not wait for other ranks then.
        """
        return nullcontext()


class _NoOpBackend(Backend):
    """No framework: the function alone."""

    can_reuse_processes = True
