"""TensorflowConfig and the setup of TensorFlow workers.

`tf.distribute.MultiWorkerMirroredStrategy()` finds the workers in TF_CONFIG and connects them when
the training function creates it. A process can join only one cluster, so a restart replaces all
processes. TensorFlow takes two seconds to import, so the driver does not import it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drawbar._rendezvous import reserved_port
from drawbar.tensorflow._compat import enable_keras_v3_saving
from drawbar.train import ScalingConfig, collective, get_context
from drawbar.train.backend import Backend, BackendConfig, get_worker_address, require_package

_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_STARTUP_MESSAGE = re.compile(
    rb"WARNING: All log messages before absl|I0000 |.*failed call to cuInit"
)
_fresh_processes: set[int] = set()
"""ID of this process, if it was started for a run and has not used TensorFlow otherwise."""


@dataclass(frozen=True)
class TensorflowConfig(BackendConfig):
    """Configure the workers of a `TensorflowTrainer`.

    Args:
        use_legacy_keras: Whether `tf.keras` is Keras 2, from the package `tf_keras`. Its
            `model.fit` works under `MultiWorkerMirroredStrategy`, Keras 3's does not.
            `import keras` always imports Keras 3.

    Raises:
        TypeError: `use_legacy_keras` is not a bool.

    Example:
        ```python
        config = TensorflowConfig(use_legacy_keras=False)
        trainer = TensorflowTrainer(train_func, tensorflow_config=config)
        ```
    """

    use_legacy_keras: bool = True

    @property
    def backend_cls(self) -> type[Backend]:
        """Class of the backend."""
        return TensorflowBackend

    @property
    def process_setup_hook(self) -> Callable[[], object]:
        """Function that imports TensorFlow, which takes two seconds."""
        return partial(import_tensorflow, {_LEGACY_KERAS: str(int(self.use_legacy_keras))})

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check that TensorFlow is installed and, for `use_legacy_keras`, also `tf_keras`.

        Raises:
            ModuleNotFoundError: A package is not installed.
        """
        require_package("tensorflow", extra="tensorflow")
        if self.use_legacy_keras:
            require_package("tf_keras", extra="tensorflow")

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        """Set TF_CONFIG and TensorFlow's number of threads for the training function."""
        with tf_config_env(), explain_errors(), enable_keras_v3_saving():
            yield


class TensorflowBackend(Backend):
    """Backend of TensorflowTrainer. It has no controller part; each attempt uses new processes.

    Example:
        ```python
        @dataclass(frozen=True)
        class MyConfig(BackendConfig):
            @property
            def backend_cls(self):
                return drawbar.tensorflow.TensorflowBackend
        ```
    """


def import_tensorflow(variables: dict[str, str]) -> None:
    """Set variables that TensorFlow reads at import time, and import it."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # hide messages of every start
    with _filter_startup_messages():
        tensorflow = importlib.import_module("tensorflow")
        if not any(Path("/dev").glob("nvidia*")):
            # Without a GPU, TensorFlow logs here that there is no driver, and not again later.
            tensorflow.config.list_physical_devices("GPU")
    _fresh_processes.add(os.getpid())


@contextmanager
def _filter_startup_messages() -> Iterator[None]:
    """Hide messages of TensorFlow's C++ code that it prints at every log level."""
    with tempfile.TemporaryFile() as captured:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            os.write(2, b"".join(line for line in captured if not _STARTUP_MESSAGE.match(line)))


@contextmanager
def explain_errors() -> Iterator[None]:
    """Add advice to the error that Keras 3 raises under a tf.distribute strategy."""
    try:
        yield
    except ValueError as error:
        if "PerReplica" in str(error):
            error.add_note(
                "Keras 3's fit() does not work under tf.distribute strategies. Use "
                "drawbar.keras.KerasTrainer(keras_backend='tensorflow') without a strategy, "
                "Keras 2 (import tf_keras), or strategy.run()."
            )
        raise


@contextmanager
def tf_config_env() -> Iterator[None]:
    """Set TF_CONFIG during the context, and the number of threads from the worker's CPUs.

    The port stays reserved but not bound, because TensorFlow rejects a bound port. With one worker,
    TF_CONFIG is not set in a process that has already used TensorFlow, which would reject it.
    """
    context = get_context()
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal():
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", threads)
        os.environ.setdefault("TF_NUM_INTEROP_THREADS", threads)
    if context.get_world_size() == 1 and os.getpid() not in _fresh_processes:
        yield
        return
    with reserved_port() as port:
        address = f"{get_worker_address()}:{port}"
        processes = collective.all_gather((os.uname().nodename, os.getpid(), address))
        _check_processes([(node, pid) for node, pid, _ in processes])
        task = {"type": "worker", "index": context.get_world_rank()}
        workers = {"worker": [address for _, _, address in processes]}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": workers, "task": task})
        yield


def _check_processes(processes: list[tuple[str, int]]) -> None:
    if len(set(processes)) < len(processes):
        raise RuntimeError(
            "TensorFlow supports one worker per process, but these ranks are threads of one "
            "process. Use TensorflowTrainer or KerasTrainer, or run_in_threads(num_workers=1)."
        )
