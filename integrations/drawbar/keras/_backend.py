"""How Keras workers are set up: the backend of Keras, and how its processes meet.

Keras reads which backend it has as it is imported, once per process. So each worker's process
imports it as soon as it is up; before the training function the backend's own processes meet as
they do for a trainer of that framework, and all ranks get the same random seed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

from drawbar.keras._lazy_tensorflow import delay_tensorflow_import
from drawbar.train import ScalingConfig, get_context
from drawbar.train.backend import Backend, BackendConfig, require_package

KerasBackendName = Literal["torch", "jax", "tensorflow"]

_BACKEND_ENV = "KERAS_BACKEND"


def _torch_config() -> BackendConfig:
    from drawbar.torch import TorchConfig

    return TorchConfig()


def _jax_config() -> BackendConfig:
    from drawbar.jax import JaxConfig

    return JaxConfig()


def _tensorflow_config() -> BackendConfig:
    from drawbar.tensorflow import TensorflowConfig

    return TensorflowConfig(use_legacy_keras=False)


_DEFAULT_CONFIGS = {"torch": _torch_config, "jax": _jax_config, "tensorflow": _tensorflow_config}


@dataclass(frozen=True)
class KerasConfig(BackendConfig):
    """Which backend Keras has in the workers, and how that one's processes meet.

    Args:
        keras_backend: "torch", "jax" or "tensorflow".
        backend_config: A `TorchConfig`, `JaxConfig` or `TensorflowConfig`. Default: as the trainer
            of that framework has it.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.
    """

    keras_backend: KerasBackendName = "tensorflow"
    backend_config: BackendConfig | None = None

    def __post_init__(self) -> None:
        names = get_args(KerasBackendName)
        if self.keras_backend not in names:
            raise ValueError(
                f"keras_backend must be one of {', '.join(map(repr, names))} or None, "
                f"found {self.keras_backend!r}"
            )
        if self.backend_config is not None and not isinstance(self.backend_config, BackendConfig):
            raise TypeError(
                f"KerasConfig.backend_config must be a BackendConfig, found {self.backend_config!r}"
            )

    @property
    def framework_config(self) -> BackendConfig:
        """How the backend's own processes meet."""
        require_package(self.keras_backend, extra=self.keras_backend)
        return self.backend_config or _DEFAULT_CONFIGS[self.keras_backend]()

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with the controller's part: that of the backend."""
        return self.framework_config.backend_cls

    @property
    def process_setup_hook(self) -> Callable[[], object]:
        """Import Keras with its backend, which takes seconds."""
        return partial(_import_keras, self.keras_backend, self.framework_config.process_setup_hook)

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check that Keras and the backend are installed, and what the backend's workers need.

        Raises:
            ModuleNotFoundError: One of them is not; the message has the command that installs it.
        """
        require_package("keras", extra="keras")
        self.framework_config.check_requirements(scaling_config)

    def train_func_context(self) -> AbstractContextManager[None]:
        """Have the backend's processes meet, and Keras use them all."""
        return _set_up(self)


def _import_keras(backend: str, framework_setup: Callable[[], object] | None) -> None:
    os.environ[_BACKEND_ENV] = backend
    if framework_setup is not None:
        framework_setup()
    importlib.import_module("keras")
    if backend != "tensorflow":
        delay_tensorflow_import()


def current_keras_backend() -> KerasBackendName:
    """Say which backend Keras has, or would have, in this process."""
    found = os.environ.get(_BACKEND_ENV, "tensorflow")
    if (keras := sys.modules.get("keras")) is not None and hasattr(keras, "backend"):
        found = keras.backend.backend()
    return cast(KerasBackendName, found)


@contextmanager
def _set_up(config: KerasConfig) -> Iterator[None]:
    with _keras_backend_env(config.keras_backend), config.framework_config.train_func_context():
        if get_context().get_world_size() == 1:
            yield
            return
        import keras

        keras.utils.set_random_seed(int(get_context().get_run_id()[:7], 16))
        with _distribute_model(keras, config.keras_backend):
            yield


@contextmanager
def _keras_backend_env(backend: str) -> Iterator[None]:
    """Have Keras have this backend, if it is imported only now."""
    before = os.environ.get(_BACKEND_ENV)
    os.environ[_BACKEND_ENV] = backend
    try:
        if (found := current_keras_backend()) != backend:
            raise RuntimeError(
                f"this trainer has keras_backend={backend!r}, but Keras was imported with "
                f"{found!r} in this process, which cannot be changed any more. Import it inside "
                f"the training function, or set {_BACKEND_ENV}={backend} before it is imported"
            )
        yield
    finally:
        del os.environ[_BACKEND_ENV]
        if before is not None:
            os.environ[_BACKEND_ENV] = before


@contextmanager
def _distribute_model(keras: Any, backend: str) -> Iterator[None]:
    if backend == "tensorflow":
        import tensorflow as tf

        tf.distribute.MultiWorkerMirroredStrategy()  # connects the workers, and is not used itself
    if backend != "jax":
        yield
        return
    import jax

    distribution = keras.distribution.DataParallel(devices=jax.devices(), auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(None)
