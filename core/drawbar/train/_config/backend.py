"""Base classes that a framework integration implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, Protocol, TypeVar

from drawbar._base.fields import CheckedConfig
from drawbar.train._config.scaling_config import ScalingConfig

P = ParamSpec("P")
R = TypeVar("R")


class BackendWorkerGroup(Protocol):
    """Started workers, as a `Backend` uses them. Results are in rank order.

    Example:
        ```python
        class MyBackend(Backend):
            def on_start(self, worker_group, backend_config):
                address = worker_group.execute_single(0, get_worker_address)
                worker_group.execute(connect, address, world_size=len(worker_group))
        ```
    """

    def __len__(self) -> int:
        """Return the number of workers."""
        ...

    def execute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run a function on every worker and wait for all results.

        Args:
            function: Function to run in the process of each worker.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            Return values in rank order.
        """
        ...

    def execute_async(
        self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> list[Any]:
        """Run a function on every worker without waiting.

        Args:
            function: Function to run in the process of each worker.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            Object references to the return values, in rank order.
        """
        ...

    def execute_single(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a function on one worker and wait for its result.

        Args:
            rank: Rank of the worker.
            function: Function to run in the process of the worker.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            Return value of the function.
        """
        ...

    def execute_single_async(
        self, rank: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """Run a function on one worker without waiting.

        Args:
            rank: Rank of the worker.
            function: Function to run in the process of the worker.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.

        Returns:
            Object reference to the return value.
        """
        ...


class LauncherStore(Protocol):
    """Key-value store shared by the processes that an external launcher has started.

    `torch.distributed.TCPStore` is one implementation.

    Example:
        ```python
        store = backend_config.get_launcher_store()
        if store is not None:
            store.set("key", "value")
        ```
    """

    def set(self, key: str, value: str) -> object:
        """Store a value for all processes.

        Args:
            key: Key of the value.
            value: Value to store.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return a value, waiting until a process has stored it.

        Args:
            key: Key of the value.

        Returns:
            The value, encoded as UTF-8.

        Raises:
            RuntimeError: No process has stored it within the time limit of the store.
        """
        ...


class Backend:
    """Controller's part of a framework integration. The default hooks do nothing.

    If a hook raises an exception, the start of the workers fails. `on_shutdown` also runs after a
    failure, and its exceptions are only logged.

    Example:
        ```python
        class MyBackend(Backend):
            def on_start(self, worker_group, backend_config):
                address = worker_group.execute_single(0, get_worker_address)
                worker_group.execute(connect, address)

            def on_shutdown(self, worker_group, backend_config):
                worker_group.execute(disconnect)
        ```
    """

    share_cuda_visible_devices: bool = False
    """True if each worker sees all GPUs of the run on its node, not only its assigned ones."""

    can_reuse_processes: bool = False
    """True if a process can be initialized again after an attempt, with another world size."""

    def on_start(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        """Set up the framework when all workers have started and have their ranks.

        No user code has run yet.

        Args:
            worker_group: Started workers.
            backend_config: Config of this backend.
        """

    def on_training_start(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        """Run after `on_start` has finished on every worker, before training starts.

        Args:
            worker_group: Started workers.
            backend_config: Config of this backend.
        """

    def on_shutdown(self, worker_group: BackendWorkerGroup, backend_config: Any) -> None:
        """Shut the framework down at the end of an attempt.

        Args:
            worker_group: Workers that did not fail.
            backend_config: Config of this backend.
        """


class BackendConfig(CheckedConfig):
    """User settings of a framework. Subclass it as a frozen dataclass.

    The constructor rejects unknown arguments with a suggestion, and checks the fields against
    their annotations. A function in `Annotated`, such as `parse_duration` or `at_least(1)`,
    replaces the check of the type: it receives the name and the value, and returns the value to
    store. A subclass that defines `__post_init__` calls `super().__post_init__()`.

    Attributes:
        recovers_in_place: Whether runs with this config use `FailureConfig(recovery="in_place")`.
            It has no effect with `max_failures=0`. Default: False.

    Raises:
        TypeError: An argument is unknown or has the wrong type.
        ValueError: An argument has a value that its annotation does not allow.

    Example:
        ```python
        @dataclass(frozen=True)
        class MyConfig(BackendConfig):
            timeout_s: Annotated[float | timedelta, parse_duration] = 60

            @property
            def backend_cls(self):
                return MyBackend
        ```
    """

    recovers_in_place = False

    @property
    def backend_cls(self) -> type[Backend]:
        """Class of the controller's part of the integration."""
        return _NoOpBackend

    @property
    def process_setup_hook(self) -> Callable[[], object] | None:
        """Function that each worker process runs when it starts, such as a slow import.

        The function is pickled. Other workers may not have started yet. Processes that are reused
        for another attempt do not run it again, and workers that are threads never run it. An
        exception fails the start of the workers. Default: None.
        """
        return None

    @property
    def forkserver_preload(self) -> Sequence[str]:
        """Slow modules that every worker imports before the training function.

        Workers may be forked from a process that has imported them; see
        `RunConfig.forkserver_preload`. Default: none.
        """
        return ()

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check packages and arguments in the driver, before a process starts.

        Args:
            scaling_config: Scaling configuration of the run.

        Raises:
            ImportError: A package is missing or too old.
            TypeError: A setting has the wrong type.
            ValueError: A setting is out of range or conflicts with the scaling configuration.
        """

    def check_in_place_recovery(self, scaling_config: ScalingConfig) -> None:
        """Check that `FailureConfig(recovery="in_place")` works with this backend.

        Args:
            scaling_config: Scaling configuration of the run.

        Raises:
            ValueError: It does not, which is the default.
        """
        raise ValueError(
            "recovery='in_place' needs drawbar.torch.TorchTrainer. Use it, or recovery='restart'."
        )

    def get_launcher_store(self) -> LauncherStore | None:
        """Return the store of the external launcher that started this process.

        With `num_workers=0`, the processes of the launcher are the ranks of one run. Their
        environment variables RANK, WORLD_SIZE, LOCAL_RANK, and LOCAL_WORLD_SIZE are set. The
        launcher also restarts failed processes, so `FailureConfig.max_failures` is ignored.

        Returns:
            The store, or None (the default) without a launcher.
        """
        return None

    def train_func_context(self) -> AbstractContextManager[None]:
        """Return a context manager that wraps the training function on each worker.

        It sets the framework up and shuts it down. Inside, `get_context()`, environment variables,
        and `drawbar.train.collective` can be used. Its exit also runs if the function raised an
        exception or was interrupted, and must not wait for other ranks in that case.

        Returns:
            The context manager.
        """
        return nullcontext()


class _NoOpBackend(Backend):
    """Backend without a framework."""

    can_reuse_processes = True
