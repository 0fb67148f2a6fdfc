"""PyTorch through XLA: AWS Trainium and Inferentia with torch-neuronx, and other devices of
torch_xla.

Only what a machine without such a device can check is tested; the variables and commands are those
of the AWS Neuron documentation
(https://awsdocs-neuron.readthedocs-hosted.com/en/latest/frameworks/torch/index.html).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch

from drawbar.torch._attempt_cleanup import attempt_cleanup, set_env
from drawbar.torch._backend import TorchConfig, set_torch_threads
from drawbar.torch._process_group import process_group
from drawbar.train import ScalingConfig, get_context

_INSTALL_NEURON = (
    "pip install torch-neuronx neuronx-cc --extra-index-url https://pip.repos.neuron.amazonaws.com"
)

_EFA_ENV = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
"""What AWS asks for between nodes, whose network is the Elastic Fabric Adapter."""

_GRAPH_EXTRACTION_ENV = {
    "NEURON_PARALLEL_COMPILE": "1",
    "NEURON_EXTRACT_GRAPHS_ONLY": "1",
    "NEURON_FALL_BACK_TO_NULL_NEFF": "1",
}
"""What `neuron_parallel_compile` sets for a trial run."""


@dataclass(frozen=True)
class TorchXLAConfig(TorchConfig):
    """A `TorchConfig` for XLA devices: the process group has the backend "xla".

    Ask for the devices by `ScalingConfig(resources_per_worker={"neuron_cores": 1})`;
    `torch_xla.device()` is the worker's.

    Args:
        neuron_parallel_compile: Make this a trial run, after which all graphs that it needed are
            compiled in parallel, by one worker per node, into the Neuron cache. A few steps are
            enough; what they compute is not valid.
    """

    neuron_parallel_compile: bool = False

    def resolve_backend(self, *, gpus: bool) -> str:
        """Say which backend of `torch.distributed` is used: "xla" unless one is set."""
        return self.backend or "xla"

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check that torch_xla is installed.

        Raises:
            ImportError: It is not.
        """
        if importlib.util.find_spec("torch_xla") is None:
            raise ImportError(
                "TorchXLAConfig needs torch_xla, which is not installed here. On AWS Trainium and "
                f"Inferentia run: {_INSTALL_NEURON}; elsewhere install the torch_xla that belongs "
                f"to torch {torch.__version__}",
                name="torch_xla",
            )

    def train_func_context(self) -> AbstractContextManager[None]:
        """Make the process group before the training function, take it down after it."""
        return _set_up(self)


@contextmanager
def _set_up(config: TorchXLAConfig) -> Iterator[None]:
    context = get_context()
    with attempt_cleanup():
        set_torch_threads()
        set_env("TORCHELASTIC_RUN_ID", context.get_run_id())  # how torch-neuronx knows a launcher
        assert not isinstance(config.timeout_s, timedelta)  # seconds, since it was checked
        if context.get_local_world_size() < context.get_world_size():
            _set_env_defaults(_EFA_ENV)
        if config.neuron_parallel_compile:
            _set_env_defaults(_GRAPH_EXTRACTION_ENV)
        with process_group(
            config.resolve_backend(gpus=False),
            timedelta(seconds=config.timeout_s),
            torch.device("cpu"),
            set_master_env=True,
            before_init=_import_xla_backend,
        ):
            yield
    if config.neuron_parallel_compile and context.get_local_rank() == 0:
        compile_graphs()


def _import_xla_backend() -> None:
    importlib.import_module("torch_xla.distributed.xla_backend")


def compile_graphs() -> None:
    """Compile the graphs that a trial run has left in the Neuron cache.

    Raises:
        RuntimeError: There is no `neuron_parallel_compile` command here, or it failed.
    """
    # The command line asks for a script also where it only compiles; `true` is one that does
    # nothing.
    command = ["neuron_parallel_compile", "--command", "compile", "true"]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError as missing:
        raise RuntimeError(
            "TorchXLAConfig(neuron_parallel_compile=True) needs the command "
            "neuron_parallel_compile, which is not on the worker's PATH; "
            f"it comes with: {_INSTALL_NEURON}"
        ) from missing
    except subprocess.CalledProcessError as failed:
        raise RuntimeError(
            f"{' '.join(command)} ended with exit code {failed.returncode}"
        ) from failed


def _set_env_defaults(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        if name not in os.environ:
            set_env(name, value)
