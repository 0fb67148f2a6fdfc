"""KerasConfig and the setup of Keras workers.

Keras selects its backend once per process, when it is imported. Each worker process therefore
imports Keras at its start. Before the training function, the processes of the backend are connected
as in the trainer of that framework, and all ranks get the same random seed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from drawbar.keras._compat import delay_tensorflow_import, restore_attributes
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
    """Select the Keras backend and configure its workers.

    Args:
        keras_backend: "torch", "jax", or "tensorflow".
        backend_config: A `TorchConfig`, `JaxConfig`, or `TensorflowConfig`. Default: the default of
            the trainer of that framework.

    Raises:
        TypeError, ValueError: An argument has the wrong type or value.

    Example:
        ```python
        from drawbar.torch import TorchConfig

        config = KerasConfig("torch", backend_config=TorchConfig(backend="gloo"))
        ```
    """

    keras_backend: KerasBackendName = "tensorflow"
    backend_config: BackendConfig | None = None

    @property
    def framework_config(self) -> BackendConfig:
        """Configuration of the framework that Keras uses as its backend."""
        require_package(self.keras_backend, extra=self.keras_backend)
        return self.backend_config or _DEFAULT_CONFIGS[self.keras_backend]()

    @property
    def backend_cls(self) -> type[Backend]:
        """Backend class of the framework."""
        return self.framework_config.backend_cls

    @property
    def process_setup_hook(self) -> Callable[[], object]:
        """Function that imports Keras with its backend, which takes seconds."""
        return partial(_import_keras, self.keras_backend, self.framework_config.process_setup_hook)

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check that Keras and the backend are installed, and the backend's own requirements.

        Raises:
            ModuleNotFoundError: A package is missing. The message has the installation command.
        """
        require_package("keras", extra="keras", min_version="3.10")
        self.framework_config.check_requirements(scaling_config)

    @contextmanager
    def train_func_context(self) -> Iterator[None]:
        """Connect the processes of the backend and distribute Keras models over them."""
        with (
            _keras_backend_env(self.keras_backend),
            self.framework_config.train_func_context(),
            ExitStack() as stack,
        ):
            stack.callback(restore_attributes)
            if get_context().get_world_size() > 1:
                import keras

                keras.utils.set_random_seed(int(get_context().get_run_id()[:7], 16))
                stack.enter_context(_distribute_model(keras, self.keras_backend))
            yield


def _import_keras(backend: str, framework_setup: Callable[[], object] | None) -> None:
    os.environ[_BACKEND_ENV] = backend
    if framework_setup is not None:
        framework_setup()
    importlib.import_module("keras")
    if backend != "tensorflow":
        delay_tensorflow_import()


def current_keras_backend() -> KerasBackendName:
    """Return the backend that Keras has, or would have, in this process."""
    backend = os.environ.get(_BACKEND_ENV, "tensorflow")
    if (keras := sys.modules.get("keras")) is not None and hasattr(keras, "backend"):
        backend = keras.backend.backend()
    return cast(KerasBackendName, backend)


@contextmanager
def _keras_backend_env(backend: str) -> Iterator[None]:
    """Select the backend for the case that Keras is not imported yet.

    Raises:
        RuntimeError: Keras was already imported with another backend.
    """
    before = os.environ.get(_BACKEND_ENV)
    os.environ[_BACKEND_ENV] = backend
    try:
        if (current := current_keras_backend()) != backend:
            raise RuntimeError(
                f"keras_backend={backend!r} cannot be used, because Keras was already imported "
                f"with {current!r} in this process. Import keras in the training function, or set "
                f"{_BACKEND_ENV}={backend} before the import."
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

        # Creating the strategy connects the workers. The strategy itself is not used.
        tf.distribute.MultiWorkerMirroredStrategy()
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
