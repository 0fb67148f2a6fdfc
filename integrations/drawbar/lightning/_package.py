"""Select between the `lightning` and `pytorch_lightning` packages.

Both packages contain the same classes, and a Trainer rejects a strategy, environment, or plugin
whose base class is from the other package. When `drawbar.lightning` is imported, the user's package
may not be imported yet, since import sorters move that line up. Classes therefore only name their
base class, and it is bound when an object is created. By then, the user has imported one package.
This module selects the package without importing either of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, get_args

from drawbar.train.backend import make_import_error, require_package, require_version

require_package("torch", extra="lightning")

T = TypeVar("T", bound="LateBoundBase")

Package = Literal["lightning", "pytorch_lightning"]

MIN_VERSION = "2.4"

_ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}

_selected_package: Package | None = None


def set_lightning_package(package: Package) -> None:
    """Select the package to use if a process imports `lightning` and `pytorch_lightning`.

    The selection applies to objects that are created afterwards.

    Args:
        package: "lightning" or "pytorch_lightning", the package of your Trainer.

    Raises:
        ValueError: `package` is neither "lightning" nor "pytorch_lightning".

    Example:
        ```python
        drawbar.lightning.set_lightning_package("pytorch_lightning")
        trainer = pytorch_lightning.Trainer(strategy=drawbar.lightning.RayDDPStrategy())
        ```
    """
    global _selected_package
    if package not in get_args(Package):
        names = " or ".join(map(repr, get_args(Package)))
        raise ValueError(f"package must be {names}, found {package!r}.")
    _selected_package = package


def detect_package() -> Package:
    """Return the package of the user's Trainer: the imported one, or else the installed one.

    Raises:
        ModuleNotFoundError: Neither is installed.
        RuntimeError: Both are imported, and `set_lightning_package` was not called.
    """
    if _selected_package is not None:
        return _selected_package
    names = get_args(Package)
    imported = [name for name in names if sys.modules.get(_ROOTS[name])]
    if len(imported) > 1:
        raise RuntimeError(
            "Both lightning and pytorch_lightning are imported, and their classes cannot be mixed. "
            'Import one, or call drawbar.lightning.set_lightning_package("lightning") or '
            '("pytorch_lightning").'
        )
    candidates: list[Package] = imported or installed_packages()
    if not candidates:
        raise make_import_error("pytorch_lightning", extra="lightning")
    return candidates[0]


def installed_packages() -> list[Package]:
    """Return the installed packages without importing them."""
    return [name for name in get_args(Package) if importlib.util.find_spec(name) is not None]


def import_lightning_class(path: str, package: Package) -> Any:
    """Import a class of a package by its path, for example "strategies.DDPStrategy"."""
    module, _, name = f"{_ROOTS[package]}.{path}".rpartition(".")
    try:
        version: str = importlib.import_module(package).__version__
    except (ImportError, AttributeError) as error:
        raise make_import_error(package, extra="lightning") from error
    require_version(package, version, MIN_VERSION)
    return getattr(importlib.import_module(module), name)


class LateBoundBase:
    """Class whose Lightning base class is bound when an object is created.

        class RayLightningEnvironment(LateBoundBase, ClusterEnvironment, base="plugins...."):

    The base is also listed as usual for type checkers; `_bases.py` defines it as `object` at run
    time. Creating an object returns an instance of a subclass with both bases. `isinstance`,
    subclassing, `super()`, pickle, and copy work as usual.
    """

    package: ClassVar[Package]
    """Package from which the base class of this object comes."""

    _base: ClassVar[str]

    def __init_subclass__(cls, *, base: str | None = None, **options: object) -> None:
        super().__init_subclass__(**options)
        if base is not None:
            cls._base = base

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        has_base = hasattr(cls, "package")
        return object.__new__(cls if has_base else bind_base(cls, detect_package()))

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (type(self).__mro__[1], self.package), self.__getstate__()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for {self.package}>"


_bound_classes: dict[tuple[type[LateBoundBase], Package], type[LateBoundBase]] = {}


def bind_base(cls: type[T], package: Package) -> type[T]:
    """Return the subclass of a `LateBoundBase` class with its base class from a package."""
    if (cls, package) not in _bound_classes:
        _bound_classes[cls, package] = _create_bound_class(cls, package)
    return cast("type[T]", _bound_classes[cls, package])


def _create_bound_class(cls: type[LateBoundBase], package: Package) -> type[LateBoundBase]:
    base = import_lightning_class(cls._base, package)
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "package": package,
    }
    return types.new_class(cls.__name__, (cls, base), exec_body=lambda body: body.update(namespace))


def _unpickle(cls: type[LateBoundBase], package: Package) -> object:
    return object.__new__(bind_base(cls, package))
