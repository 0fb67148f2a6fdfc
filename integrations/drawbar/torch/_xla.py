"""TorchXLAConfig: PyTorch/XLA devices such as AWS Trainium.

The tests use no XLA devices. Variables and commands follow the AWS Neuron documentation
(https://awsdocs-neuron.readthedocs-hosted.com/en/latest/frameworks/torch/index.html).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
"""Variables that AWS requires for communication between nodes over the Elastic Fabric Adapter."""

_GRAPH_EXTRACTION_ENV = {
    "NEURON_PARALLEL_COMPILE": "1",
    "NEURON_EXTRACT_GRAPHS_ONLY": "1",
    "NEURON_FALL_BACK_TO_NULL_NEFF": "1",
}
"""Variables that `neuron_parallel_compile` sets for a trial run."""


@dataclass(frozen=True)
class TorchXLAConfig(TorchConfig):
    """`TorchConfig` for XLA devices, with the process group backend "xla".

    Request devices with `ScalingConfig(resources_per_worker={"neuron_cores": 1})`. The device of a
    worker is `torch_xla.device()`.

    Args:
        backend: Backend of `torch.distributed`. Default: "xla".
        init_method: See `TorchConfig`.
        timeout_s: See `TorchConfig`.
        neuron_parallel_compile: Whether the run is a trial run, whose results are not valid. When
            the training function ends, one worker per node compiles all required graphs in parallel
            into the Neuron cache. A few training steps are enough.

    Example:
        ```python
        TorchTrainer(
            train_func,
            torch_config=TorchXLAConfig(),
            scaling_config=ScalingConfig(
                num_workers=2, resources_per_worker={"neuron_cores": 1}
            ),
        ).fit()
        ```
    """

    neuron_parallel_compile: bool = False

    def resolve_backend(self, *, has_gpus: bool) -> str:
        """Return the backend of `torch.distributed`: "xla" unless one is set."""
        return self.backend or "xla"

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check that torch_xla is installed.

        Raises:
            ImportError: torch_xla is not installed.
        """
        if importlib.util.find_spec("torch_xla") is None:
            raise ImportError(
                "TorchXLAConfig needs torch_xla, which is not installed. On AWS Trainium and "
                f"Inferentia, run: {_INSTALL_NEURON}; elsewhere, install the torch_xla version for "
                f"torch {torch.__version__}.",
                name="torch_xla",
            )

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        """Create the process group before the training function, and destroy it afterwards."""
        context = get_context()
        with attempt_cleanup():
            set_torch_threads()
            # torch-neuronx detects a launcher by this variable.
            set_env("TORCHELASTIC_RUN_ID", context.get_run_id())
            assert not isinstance(self.timeout_s, timedelta)  # __post_init__ converts to seconds
            if context.get_local_world_size() < context.get_world_size():
                _set_env_defaults(_EFA_ENV)
            if self.neuron_parallel_compile:
                _set_env_defaults(_GRAPH_EXTRACTION_ENV)
            with process_group(
                self.resolve_backend(has_gpus=False),
                timedelta(seconds=self.timeout_s),
                torch.device("cpu"),
                set_master_env=True,
                before_init=_import_xla_backend,
            ):
                yield
        if self.neuron_parallel_compile and context.get_local_rank() == 0:
            compile_graphs()


def _import_xla_backend() -> None:
    importlib.import_module("torch_xla.distributed.xla_backend")


def compile_graphs() -> None:
    """Compile the graphs that a trial run has stored in the Neuron cache.

    Raises:
        RuntimeError: The command `neuron_parallel_compile` does not exist or failed.
    """
    # The command requires a program even if it only compiles; `true` does nothing.
    command = ["neuron_parallel_compile", "--command", "compile", "true"]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError as missing:
        raise RuntimeError(
            "TorchXLAConfig(neuron_parallel_compile=True) needs the command "
            "neuron_parallel_compile, which is not on the worker's PATH. "
            f"Install it with: {_INSTALL_NEURON}"
        ) from missing
    except subprocess.CalledProcessError as failed:
        raise RuntimeError(f"{' '.join(command)} exited with code {failed.returncode}") from failed


def _set_env_defaults(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        if name not in os.environ:
            set_env(name, value)
