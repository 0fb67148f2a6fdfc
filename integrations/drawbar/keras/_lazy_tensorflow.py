"""Delay Keras's import of TensorFlow until TensorFlow is used.

If TensorFlow is installed, Keras imports it with every backend, to set its seed and to check
whether saved objects are TensorFlow's. This takes two seconds per worker and prints messages.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def delay_tensorflow_import() -> None:
    """Hide TensorFlow from Keras in this process until other code imports it."""
    for name in ("saving.serialization_lib", "utils.rng_utils"):
        module: Any = importlib.import_module(f"keras.src.{name}")
        module.tf = _LazyTensorFlow()
    sys.meta_path.insert(0, _SeedOnImportFinder())


class _LazyTensorFlow:
    """Replacement for the TensorFlow module in Keras."""

    @property
    def available(self) -> bool:
        return "tensorflow" in sys.modules

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("tensorflow"), name)


class _SeedOnImportFinder(MetaPathFinder):
    """Import hook that seeds TensorFlow with Keras's seed when it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "tensorflow" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_seed(module: Any) -> None:
            execute(module)
            seed = importlib.import_module("keras.src.utils.rng_utils").get_random_seed()
            if seed is not None:
                module.random.set_seed(seed)

        spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec
