"""How TensorFlow workers are set up: the settings, and what is done with them around the function.

The workers find each other by TF_CONFIG, where `tf.distribute.MultiWorkerMirroredStrategy()` looks.
TensorFlow itself connects them when the function makes the strategy. A process can be part of one
such cluster only, so a restart replaces all processes. TensorFlow takes two seconds to import: the
driver does without it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drawbar._rendezvous import reserved_port
from drawbar.train import ScalingConfig, collective, get_context
from drawbar.train.backend import Backend, BackendConfig, get_worker_address, require_package

_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_STARTUP_MESSAGE = re.compile(
    rb"WARNING: All log messages before absl|I0000 |.*failed call to cuInit"
)
_fresh_processes: set[int] = set()
"""This process's id, if it was started for a run and TensorFlow does nothing else in it."""


@dataclass(frozen=True)
class TensorflowConfig(BackendConfig):
    """How the workers of a `TensorflowTrainer` are set up.

    Args:
        use_legacy_keras: Have `tf.keras` be Keras 2, from the package `tf_keras`, whose `model.fit`
            works under `MultiWorkerMirroredStrategy`; that of Keras 3 does not. `import keras` is
            Keras 3 either way.

    Raises:
        TypeError: `use_legacy_keras` is no bool.
    """

    use_legacy_keras: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.use_legacy_keras, bool):
            raise TypeError(
                f"TensorflowConfig.use_legacy_keras must be a bool, found {self.use_legacy_keras!r}"
            )

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with the controller's part, of which there is none."""
        return TensorflowBackend

    @property
    def process_setup_hook(self) -> Callable[[], object]:
        """Import TensorFlow, which takes two seconds."""
        return partial(import_tensorflow, {_LEGACY_KERAS: str(int(self.use_legacy_keras))})

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check that TensorFlow is installed, and `tf_keras` if it is asked for.

        Raises:
            ModuleNotFoundError: It is not.
        """
        require_package("tensorflow", extra="tensorflow")
        if self.use_legacy_keras:
            require_package("tf_keras", extra="tensorflow")

    def train_func_context(self) -> AbstractContextManager[None]:
        """Set TF_CONFIG and TensorFlow's threads before the training function."""
        return _set_up()


class TensorflowBackend(Backend):
    """TensorFlow needs nothing in the controller, and a new process for each attempt."""


def import_tensorflow(variables: dict[str, str]) -> None:
    """Set variables that TensorFlow reads as it is imported, and import it."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # without what it says at every start
    with _filter_startup_messages():
        tensorflow = importlib.import_module("tensorflow")
        if not any(Path("/dev").glob("nvidia*")):
            tensorflow.config.list_physical_devices("GPU")  # says here that there is no driver
    _fresh_processes.add(os.getpid())


@contextmanager
def _filter_startup_messages() -> Iterator[None]:
    """Leave out what TensorFlow's C++ code says at every start, whatever the level is set to."""
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
def _set_up() -> Iterator[None]:
    with tf_config_env(), explain_errors():
        _enable_keras_v3_saving()
        yield


def _enable_keras_v3_saving() -> None:
    """Have Keras 2 save `.keras` files in this thread too, from the second one on.

    In all but the thread that has imported it, it saves HDF5 by that name after the first.
    """
    saving = sys.modules.get("tf_keras.src.saving.saving_lib")
    enabled = getattr(saving, "_SAVING_V3_ENABLED", None)
    if enabled is not None:
        enabled.value = True


@contextmanager
def explain_errors() -> Iterator[None]:
    """Say what to do instead where Keras 3 fails inside with what nobody can make sense of."""
    try:
        yield
    except ValueError as error:
        if "PerReplica" in str(error):
            error.add_note(
                "The fit() of Keras 3 does not work under a tf.distribute strategy. Either use "
                "drawbar.keras.KerasTrainer with keras_backend='tensorflow', and no strategy; or "
                "Keras 2, by `import tf_keras`; or a loop of your own, by strategy.run."
            )
        raise


@contextmanager
def tf_config_env() -> Iterator[None]:
    """Set TF_CONFIG while the context lasts, and as many threads as the worker has CPUs.

    The port stays reserved; TensorFlow refuses one that is bound. A world of one has no TF_CONFIG
    in a process that has used TensorFlow before: it would be refused there.
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
        own = (os.uname().nodename, os.getpid(), f"{get_worker_address()}:{port}")
        met = collective.all_gather(own)
        _check_processes([(node, pid) for node, pid, _ in met])
        task = {"type": "worker", "index": context.get_world_rank()}
        workers = {"worker": [address for _, _, address in met]}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": workers, "task": task})
        yield


def _check_processes(processes: list[tuple[str, int]]) -> None:
    if len(set(processes)) < len(processes):
        raise RuntimeError(
            "TensorFlow knows one worker per process, and these ranks are threads of one; use a "
            "trainer with ScalingConfig(num_workers=...), or run_in_threads(num_workers=1)"
        )
