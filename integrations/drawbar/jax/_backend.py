"""How JAX workers are set up: the settings, and what is done with them around the function.

The workers are made one JAX program of several processes by `jax.distributed.initialize`. A process
can be part of one such program only, so a restart replaces all processes. Nobody leaves the program
when its function returns, since that waits for all others: JAX does it by itself as the processes
end, which they do together.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from drawbar._rendezvous import held_port
from drawbar.jax._tpu_slices import DEFAULT_MEGASCALE_PORT, multislice_env, slice_name
from drawbar.train import ScalingConfig, collective, get_context
from drawbar.train.backend import Backend, BackendConfig, get_worker_address, make_import_error

try:
    import jax
    import jax.distributed
except ImportError as error:
    raise make_import_error("jax", extra="jax") from error


@dataclass(frozen=True)
class JaxConfig(BackendConfig):
    """How the workers become one JAX program, whose `jax.devices()` are those of all workers.

    Args:
        use_tpu: Compute on TPUs. Default: what the trainer's `ScalingConfig` says.
        use_gpu: Compute on GPUs, a worker on those that Ray gave it. Default: likewise. With
            neither the workers compute on their CPUs and exchange by gloo.
        timeout_s: How long the workers wait for each other to come up, in whole seconds.
        heartbeat_timeout_s: After how many seconds without a sign of life JAX itself takes another
            process for dead and ends this one. Drawbar is faster where a process has died.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
    """

    use_tpu: bool = False
    use_gpu: bool = False
    timeout_s: int = 300
    heartbeat_timeout_s: int = 100

    def __post_init__(self) -> None:
        for name in ("use_tpu", "use_gpu"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"JaxConfig.{name} must be a bool, found {getattr(self, name)!r}")
        for name in ("timeout_s", "heartbeat_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"JaxConfig.{name} must be an int, found {value!r}")
            if value < 1:
                raise ValueError(f"JaxConfig.{name} must be at least 1 second, found {value}")
        if self.use_gpu and self.use_tpu:
            raise ValueError("JaxConfig has use_gpu=True and use_tpu=True; a worker uses one kind")

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with the controller's part, of which there is none."""
        return JaxBackend

    @property
    def process_setup_hook(self) -> Callable[[], object]:
        """Import JAX, which takes about half a second."""
        return _import_jax

    @property
    def platform(self) -> str:
        """The name by which JAX knows what is computed on: "tpu", "cuda" or "cpu"."""
        return "tpu" if self.use_tpu else "cuda" if self.use_gpu else "cpu"

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check that the workers have what is to be computed on.

        Raises:
            ValueError: They have not.
        """
        for kind, wanted, has in (
            ("gpu", self.use_gpu, scaling_config.use_gpu),
            ("tpu", self.use_tpu, scaling_config.use_tpu),
        ):
            if wanted and not has:
                raise ValueError(
                    f"JaxConfig has use_{kind}=True, but the workers have no {kind.upper()}; "
                    f"set ScalingConfig(use_{kind}=True)"
                )

    def train_func_context(self) -> AbstractContextManager[None]:
        """Join the program before the training function."""
        return _set_up(self)


class JaxBackend(Backend):
    """JAX needs nothing in the controller, and a new process for each attempt."""


def _import_jax() -> None:
    """Unpickling this function has done it."""


@contextmanager
def _set_up(config: JaxConfig) -> Iterator[None]:
    context = get_context()
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal():
        os.environ.setdefault("NPROC", threads)  # the one setting that XLA's thread pools know
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # made as it is imported
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or config.platform)
    try:
        if context.get_world_size() > 1:
            _initialize_distributed(config)
        with _explain_errors():
            yield
    finally:
        jax.config.update("jax_platforms", platforms)


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Say what to do where a script joins a program of its own, as under another launcher."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        called = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        if jax.distributed.initialize.__code__ in called:
            error.add_note(
                "A JaxTrainer's workers are one JAX program before the training function begins: "
                "leave out its jax.distributed.initialize()."
            )
        raise


def _initialize_distributed(config: JaxConfig) -> None:
    """Meet at rank 0, whose port is held before it is told and until JAX has bound it too."""
    context = get_context()
    leads = context.get_world_rank() == 0
    host = get_worker_address()
    with held_port(host) if leads else nullcontext(0) as port:
        slice_name = _current_slice() if config.use_tpu else None
        met = collective.all_gather((socket.gethostname(), os.getpid(), host, port, slice_name))
        _check_processes([(node, pid) for node, pid, *_ in met])
        _, _, coordinator, port, _ = met[0]
        # Not those that a node has been given for other slices, with which TPUs wait for ever.
        if slice_env := multislice_env(
            [each[-1] for each in met], context.get_world_rank(), coordinator
        ):
            os.environ.update(slice_env)
            os.environ.setdefault("MEGASCALE_PORT", DEFAULT_MEGASCALE_PORT)
        jax.distributed.initialize(
            f"{_format_host(coordinator)}:{port}",
            context.get_world_size(),
            context.get_world_rank(),
            cluster_detection_method="deactivate",  # neither Slurm nor MPI has started this
            coordinator_bind_address=f"{_format_host(coordinator)}:{port}",
            initialization_timeout=config.timeout_s,
            heartbeat_timeout_seconds=config.heartbeat_timeout_s,
        )


def _current_slice() -> str | None:
    import ray

    runtime = ray.get_runtime_context()
    labels: Any = runtime.get_node_labels()  # strings, though Ray's types say lists
    return slice_name(labels, runtime.get_node_id())


def _check_processes(processes: list[tuple[str, int]]) -> None:
    if len(set(processes)) < len(processes):
        raise RuntimeError(
            "JAX knows one rank per process, and these ranks are threads of one; use a JaxTrainer "
            "with ScalingConfig(num_workers=...), or run_in_threads(num_workers=1)"
        )


def _format_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
