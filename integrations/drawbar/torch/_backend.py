"""How PyTorch workers are set up: the settings, and what is done with them around the function.

All of it happens on the workers, inside `train_func_context`; the controller has nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

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
    """How the process group is made that is up when the training function starts.

    Every worker has `torch.distributed` initialised, its CUDA device set, and as many threads as
    its share of the node's cores. Accelerate finds the device in ACCELERATE_TORCH_DEVICE and, on a
    CPU worker, ACCELERATE_USE_CPU.

    Args:
        backend: A backend of `torch.distributed`, such as "gloo" or "cpu:gloo,cuda:nccl". Default:
            "nccl" if the workers have GPUs, otherwise "gloo".
        init_method: "env" also puts the address of the group's store into MASTER_ADDR and
            MASTER_PORT, as torchrun does; "tcp" leaves these variables alone. Either way rank 0
            binds a free port first and tells it after.
        timeout_s: How long a collective waits for the other ranks: seconds, or a timedelta.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
    """

    backend: str | None = None
    init_method: InitMethod = "env"
    timeout_s: float | timedelta = 1800

    def __post_init__(self) -> None:
        if self.backend is not None and not isinstance(self.backend, str):
            raise TypeError(f"TorchConfig.backend must be a str or None, found {self.backend!r}")
        if self.init_method not in get_args(InitMethod):
            raise ValueError(
                f"TorchConfig.init_method must be 'env' or 'tcp', found {self.init_method!r}"
            )
        seconds = parse_duration("TorchConfig.timeout_s", self.timeout_s)
        object.__setattr__(self, "timeout_s", seconds)

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with the controller's part, of which there is none."""
        return TorchBackend

    def resolve_backend(self, *, gpus: bool) -> str:
        """Say which backend of `torch.distributed` is used on workers with or without GPUs."""
        return self.backend or ("nccl" if gpus else "gloo")

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check the backend against the workers' GPUs.

        Raises:
            ValueError: NCCL without GPUs, or with workers that may share one.
        """
        gpus = scaling_config.num_gpus_per_worker
        backend = self.resolve_backend(gpus=gpus > 0)
        if "nccl" not in backend:
            return
        if not gpus:
            raise ValueError(
                f"TorchConfig has backend={backend!r}, but the workers have no GPU; set "
                'ScalingConfig(use_gpu=True), or TorchConfig(backend="gloo") to train on CPUs'
            )
        if gpus < 1 and scaling_config.max_workers > 1:
            raise ValueError(
                f"TorchConfig's backend is {backend!r}, which refuses workers that share a GPU, as "
                f"{scaling_config.max_workers} workers with resources_per_worker['GPU']={gpus:g} "
                'may; give each worker a whole GPU, or set TorchConfig(backend="gloo")'
            )

    def get_launcher_store(self) -> LauncherStore | None:
        """Give the store of the torchrun that has started this process as one of several."""
        return torchrun_store() if is_multiprocess_torchrun() else None

    def train_func_context(self) -> AbstractContextManager[None]:
        """Make the process group before the training function, take it down after it."""
        return _worker_setup(self)


class TorchBackend(Backend):
    """PyTorch needs nothing in the controller; a worker's process can be set up again and again."""

    share_cuda_visible_devices = True
    can_reuse_processes = True


@contextmanager
def _worker_setup(config: TorchConfig) -> Iterator[None]:
    backend = config.resolve_backend(gpus=bool(get_context().get_accelerator_ids()))
    with attempt_cleanup():
        set_torch_threads()
        reset_accelerate_state()
        device = _set_current_device(required="nccl" in backend)
        assert not isinstance(config.timeout_s, timedelta)  # seconds, since it was checked
        timeout = timedelta(seconds=config.timeout_s)
        publish = config.init_method == "env" and not uses_torchrun_store()
        with (
            process_group(backend, timeout, device, set_master_env=publish),
            warn_if_no_communication(),
        ):
            yield


def set_torch_threads() -> None:
    """Use as many threads as OMP_NUM_THREADS says, which torch reads only once per process."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal():
        on_attempt_end(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(int(threads))


def _set_current_device(*, required: bool) -> torch.device:
    """Make the worker's GPU the current one. Without NCCL it may have one that torch cannot use."""
    if not required and get_context().get_accelerator_ids() and not torch.cuda.is_available():
        return torch.device("cpu")
    device = get_device()
    if device.type == "cuda":
        # For what never asks which one: NCCL and CUDA work on the current one.
        torch.cuda.set_device(device)
    # Accelerate by itself takes the device whose number is the local rank, which Ray need not have
    # given.
    set_env("ACCELERATE_TORCH_DEVICE", str(device))
    if device.type == "cpu":
        set_env("ACCELERATE_USE_CPU", "true")
    return device
