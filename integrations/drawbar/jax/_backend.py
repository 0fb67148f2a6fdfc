"""JaxConfig and the setup of JAX workers.

`jax.distributed.initialize` connects the workers to one multi-process JAX program. A process can
join only one program, so a restart replaces all processes. Workers do not leave the program when
the training function returns, since this would wait for all others. JAX leaves it when the
processes end, which they do together.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

from drawbar._rendezvous import held_port
from drawbar.jax._tpu_slices import DEFAULT_MEGASCALE_PORT, multislice_env, slice_name
from drawbar.train import ScalingConfig, collective, get_context
from drawbar.train.backend import (
    Backend,
    BackendConfig,
    at_least,
    get_worker_address,
    make_import_error,
)

try:
    import jax
    import jax.distributed
except ImportError as error:
    raise make_import_error("jax", extra="jax") from error


@dataclass(frozen=True)
class JaxConfig(BackendConfig):
    """Configure how the workers form one multi-process JAX program.

    `jax.devices()` returns the devices of all workers.

    Args:
        use_tpu: Whether to compute on TPUs. Default: the value of the trainer's `ScalingConfig`.
        use_gpu: Whether to compute on GPUs, each worker on those that Ray assigned. Default: the
            value of the trainer's `ScalingConfig`. Without TPUs and GPUs, workers compute on CPUs
            and communicate with gloo.
        timeout_s: Time to wait for all workers to connect, in whole seconds.
        heartbeat_timeout_s: Time in seconds without a heartbeat after which JAX itself considers
            another process dead and ends this one. Drawbar detects dead processes earlier.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.

    Example:
        ```python
        trainer = JaxTrainer(train_func, jax_config=JaxConfig(timeout_s=600))
        ```
    """

    use_tpu: bool = False
    use_gpu: bool = False
    timeout_s: Annotated[int, at_least(1)] = 300
    heartbeat_timeout_s: Annotated[int, at_least(1)] = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_gpu and self.use_tpu:
            raise ValueError(
                "JaxConfig has use_gpu=True and use_tpu=True, but workers use one kind of device. "
                "Set only one of them."
            )

    @property
    def backend_cls(self) -> type[Backend]:
        """Class of the backend."""
        return JaxBackend

    @property
    def process_setup_hook(self) -> Callable[[], object]:
        """Function that imports JAX, which takes about half a second."""
        return _import_jax

    @property
    def platform(self) -> str:
        """JAX's name of the platform: "tpu", "cuda", or "cpu"."""
        return "tpu" if self.use_tpu else "cuda" if self.use_gpu else "cpu"

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check that the workers have the devices on which to compute.

        Raises:
            ValueError: The `ScalingConfig` does not request them.
        """
        for kind, is_required, is_available in (
            ("gpu", self.use_gpu, scaling_config.use_gpu),
            ("tpu", self.use_tpu, scaling_config.use_tpu),
        ):
            if is_required and not is_available:
                raise ValueError(
                    f"JaxConfig has use_{kind}=True, but the workers have no {kind.upper()}. "
                    f"Set ScalingConfig(use_{kind}=True)."
                )

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        """Initialize jax.distributed for the training function."""
        context = get_context()
        threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        if threads.isdecimal():
            os.environ.setdefault("NPROC", threads)  # the only setting of XLA's thread pools
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # defined at import time
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or self.platform)
        try:
            if context.get_world_size() > 1:
                _initialize_distributed(self)
            with _explain_errors():
                yield
        finally:
            jax.config.update("jax_platforms", platforms)


class JaxBackend(Backend):
    """Backend of JaxTrainer. It has no controller part, and each attempt uses new processes.

    Example:
        ```python
        @dataclass(frozen=True)
        class MyConfig(BackendConfig):
            @property
            def backend_cls(self):
                return drawbar.jax.JaxBackend
        ```
    """


def _import_jax() -> None:
    """Do nothing. Unpickling this function imports JAX."""


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Add advice to errors of a training function that calls jax.distributed.initialize()."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        called = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        if jax.distributed.initialize.__code__ in called:
            error.add_note(
                "JaxTrainer already initializes jax.distributed. Remove "
                "jax.distributed.initialize() from your training function."
            )
        raise


def _initialize_distributed(config: JaxConfig) -> None:
    """Connect to rank 0, whose port is held until JAX has bound it, too."""
    context = get_context()
    is_rank_zero = context.get_world_rank() == 0
    host = get_worker_address()
    with held_port(host) if is_rank_zero else nullcontext(0) as port:
        slice_name = _current_slice() if config.use_tpu else None
        workers = collective.all_gather((socket.gethostname(), os.getpid(), host, port, slice_name))
        _check_processes([(node, pid) for node, pid, *_ in workers])
        _, _, coordinator, port, _ = workers[0]
        # Overwrite the node's own variables: with values for other slices, TPUs would wait forever.
        if slice_env := multislice_env(
            [worker[-1] for worker in workers], context.get_world_rank(), coordinator
        ):
            os.environ.update(slice_env)
            os.environ.setdefault("MEGASCALE_PORT", DEFAULT_MEGASCALE_PORT)
        jax.distributed.initialize(
            f"{_format_host(coordinator)}:{port}",
            context.get_world_size(),
            context.get_world_rank(),
            cluster_detection_method="deactivate",  # the workers are not started by Slurm or MPI
            coordinator_bind_address=f"{_format_host(coordinator)}:{port}",
            initialization_timeout=config.timeout_s,
            heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        )


def _current_slice() -> str | None:
    import ray

    runtime = ray.get_runtime_context()
    labels: Any = runtime.get_node_labels()  # strings, although typed as lists
    return slice_name(labels, runtime.get_node_id())


def _check_processes(processes: list[tuple[str, int]]) -> None:
    if len(set(processes)) < len(processes):
        raise RuntimeError(
            "JAX supports one rank per process, but these ranks are threads of one process. Use "
            "JaxTrainer, or run_in_threads(num_workers=1)."
        )


def _format_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
