"""TorchConfig and the setup of PyTorch workers.

The setup runs in the worker processes, in `TorchConfig.train_func_context`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

from drawbar.train import ScalingConfig, get_context
from drawbar.train.backend import (
    Backend,
    BackendConfig,
    LauncherStore,
    make_import_error,
    parse_duration,
)

try:
    import torch
    import torch.distributed
except ImportError as error:
    raise make_import_error("torch", extra="torch") from error

from drawbar.torch._accelerate_state import reset_accelerate_state
from drawbar.torch._attempt_cleanup import attempt_cleanup, on_attempt_end, set_env
from drawbar.torch._communication_check import warn_if_no_communication
from drawbar.torch._devices import get_device
from drawbar.torch._process_group import process_group
from drawbar.torch._torchrun import is_multiprocess_torchrun, torchrun_store, uses_torchrun_store

InitMethod = Literal["env", "tcp"]


@dataclass(frozen=True)
class TorchConfig(BackendConfig):
    """Configure the `torch.distributed` process group of the workers.

    When the training function starts, `torch.distributed` is initialized on every worker, its CUDA
    device is set, and torch uses as many threads as the worker has CPUs. For Accelerate, Drawbar
    sets ACCELERATE_TORCH_DEVICE to the device and, on CPU workers, ACCELERATE_USE_CPU.

    Args:
        backend: Backend of `torch.distributed`, such as "gloo" or "cpu:gloo,cuda:nccl". Default:
            "nccl" if the workers have GPUs, otherwise "gloo".
        init_method: With "env", Drawbar sets MASTER_ADDR and MASTER_PORT to the address of the
            process group's store, as torchrun does. With "tcp", it does not set these variables.
            With both, rank 0 binds a free port before it sends the address to the other ranks.
        timeout_s: Maximum time that a collective waits for other ranks, in seconds or as a
            timedelta.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a wrong value.

    Example:
        ```python
        TorchTrainer(
            train_func,
            torch_config=TorchConfig(backend="gloo", timeout_s=600),
            scaling_config=ScalingConfig(num_workers=4),
        ).fit()
        ```
    """

    backend: str | None = None
    init_method: InitMethod = "env"
    timeout_s: Annotated[float | timedelta, parse_duration] = 1800

    @property
    def backend_cls(self) -> type[Backend]:
        """Backend class, whose hooks the controller calls."""
        return TorchBackend

    @property
    def forkserver_preload(self) -> Sequence[str]:
        """Modules that every worker imports; the optimizers of torch import `torch._dynamo`."""
        return ("torch", "torch._dynamo", "drawbar.torch")

    def resolve_backend(self, *, has_gpus: bool) -> str:
        """Return the backend of `torch.distributed` for workers with or without GPUs.

        Args:
            has_gpus: Whether the workers have GPUs.

        Returns:
            `backend` if it is set, otherwise "nccl" or "gloo".
        """
        return self.backend or ("nccl" if has_gpus else "gloo")

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check the name of the backend, and that the workers have the GPUs that it needs.

        Raises:
            ValueError: The name is probably misspelled, or the backend is NCCL, but the workers
                have no GPUs or may share one.
        """
        gpus = scaling_config.num_gpus_per_worker
        backend = self.resolve_backend(has_gpus=gpus > 0)
        _check_backend_name(backend)
        if "nccl" not in backend:
            return
        if not gpus:
            raise ValueError(
                f"TorchConfig(backend={backend!r}) needs GPUs, but the workers have none. Set "
                "ScalingConfig(use_gpu=True), or TorchConfig(backend='gloo') to train on CPUs."
            )
        if gpus < 1 and scaling_config.max_workers > 1:
            raise ValueError(
                "NCCL does not support workers that share a GPU (resources_per_worker['GPU']="
                f"{gpus:g}, {scaling_config.max_workers} workers). Give each worker a whole GPU, "
                "or set TorchConfig(backend='gloo')."
            )

    def check_in_place_recovery(self, scaling_config: ScalingConfig) -> None:
        """Check that the workers train on CPUs with gloo.

        Raises:
            ValueError: They do not.
        """
        backend = self.resolve_backend(has_gpus=scaling_config.num_gpus_per_worker > 0)
        if backend != "gloo" or scaling_config.num_gpus_per_worker:
            setting, alternative = "FailureConfig(recovery='in_place')", "recovery='restart'"
            if self.recovers_in_place:
                setting, alternative = type(self).__name__, "TorchConfig"
            raise ValueError(
                f"{setting} needs CPU workers and the backend gloo, but the backend is "
                f"{backend!r} with {scaling_config.num_gpus_per_worker:g} GPUs per worker. Use CPU "
                f"workers and backend='gloo', or {alternative}."
            )

    def get_launcher_store(self) -> LauncherStore | None:
        """Return torchrun's store if torchrun started several processes, otherwise None."""
        return torchrun_store() if is_multiprocess_torchrun() else None

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        """Create the process group before the training function, and destroy it afterwards."""
        backend = self.resolve_backend(has_gpus=bool(get_context().get_accelerator_ids()))
        with attempt_cleanup():
            set_torch_threads()
            reset_accelerate_state()
            device = _set_current_device(is_gpu_required="nccl" in backend)
            assert not isinstance(self.timeout_s, timedelta)  # __post_init__ converts to seconds
            timeout = timedelta(seconds=self.timeout_s)
            # Under torchrun, MASTER_ADDR and MASTER_PORT must keep the address of torchrun's store.
            set_master_env = self.init_method == "env" and not uses_torchrun_store()
            with (
                process_group(backend, timeout, device, set_master_env=set_master_env),
                warn_if_no_communication(),
            ):
                yield


def _check_backend_name(backend: str) -> None:
    known = torch.distributed.Backend.backend_list
    for part in backend.split(","):
        name = part.rpartition(":")[2].lower()
        # Only the workers know the backends that their packages register, such as "hccl" or "ccl".
        if name in known or name.endswith("ccl"):
            continue
        if similar := difflib.get_close_matches(name, known, 1):
            raise ValueError(
                f"TorchConfig(backend={backend!r}) names no backend of torch.distributed. Did you "
                f"mean {similar[0]!r}?"
            )


class TorchBackend(Backend):
    """Backend of TorchTrainer. A restart reuses the worker processes that are still alive.

    A config class selects its backend with the property `backend_cls`.

    Example:
        ```python
        class MyConfig(TorchConfig):
            @property
            def backend_cls(self):
                return TorchBackend
        ```
    """

    share_cuda_visible_devices = True
    can_reuse_processes = True


def set_torch_threads() -> None:
    """Set torch's number of threads to OMP_NUM_THREADS, which torch reads once per process."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal():
        on_attempt_end(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(int(threads))


def _set_current_device(*, is_gpu_required: bool) -> torch.device:
    """Set the worker's device as the current one.

    Args:
        is_gpu_required: Whether to raise an error if the worker has a GPU that torch cannot use.
            If False, the worker trains on its CPUs instead.
    """
    has_gpu = bool(get_context().get_accelerator_ids())
    if has_gpu and not is_gpu_required and not torch.cuda.is_available():
        return torch.device("cpu")
    device = get_device()
    if device.type == "cuda":
        # NCCL, and code without an explicit device, use the current CUDA device.
        torch.cuda.set_device(device)
    # By default, Accelerate uses the local rank as device index, which may differ from the GPU that
    # Ray assigned.
    set_env("ACCELERATE_TORCH_DEVICE", str(device))
    if device.type == "cpu":
        set_env("ACCELERATE_USE_CPU", "true")
    return device
