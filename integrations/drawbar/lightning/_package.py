"""Which package Lightning comes from: `lightning`, or `pytorch_lightning`.

The two hold the same classes twice over, and a Trainer refuses a strategy, an environment or a
plug-in whose base is the other package's. Which one the user means cannot be known while
`drawbar.lightning` is imported: import sorters put that line first. So a class here names its base
and stays without it; the base is put in when an object is made. By then the user has imported the
package that the model and the Trainer are from, and only that one. This module alone decides, and
neither package is imported to find out.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, get_args

from drawbar.train.backend import make_import_error, require_version

T = TypeVar("T", bound="LateBoundBase")

Package = Literal["lightning", "pytorch_lightning"]

MIN_VERSION = "2.4"

_ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}

_selected_package: Package | None = None


def set_lightning_package(package: Package) -> None:
    """Say which package the objects made from now on are for, where a process imports both.

    Raises:
        ValueError: `package` is neither "lightning" nor "pytorch_lightning".
    """
    global _selected_package
    if package not in get_args(Package):
        names = " or ".join(map(repr, get_args(Package)))
        raise ValueError(f"package must be {names}, found {package!r}")
    _selected_package = package


def detect_package() -> Package:
    """Name the package of the user's Trainer: the one imported, else the one installed.

    Raises:
        ModuleNotFoundError: Neither is installed.
        RuntimeError: Both are imported, and `set_lightning_package` has not said which.
    """
    if _selected_package is not None:
        return _selected_package
    names = get_args(Package)
    imported = [name for name in names if sys.modules.get(_ROOTS[name])]
    if len(imported) > 1:
        raise RuntimeError(
            "this process has imported both lightning and pytorch_lightning, whose classes do not "
            "go together; import one of them only, or say which one your Trainer is from by "
            'drawbar.lightning.set_lightning_package("lightning") or ("pytorch_lightning")'
        )
    found: list[Package] = imported or installed_packages()
    if not found:
        raise ModuleNotFoundError(
            'drawbar.lightning needs Lightning; run: pip install "drawbar[lightning]"'
        )
    return found[0]


def installed_packages() -> list[Package]:
    """List the packages that are installed, without importing them."""
    return [name for name in get_args(Package) if importlib.util.find_spec(name) is not None]


def import_lightning_class(path: str, package: Package) -> Any:
    """Give a class of a package by its path below the root, such as "strategies.DDPStrategy"."""
    module, _, name = f"{_ROOTS[package]}.{path}".rpartition(".")
    try:
        found: str = importlib.import_module(package).__version__
    except (ImportError, AttributeError) as error:
        raise make_import_error(package, extra="lightning") from error
    require_version(
        package, found, MIN_VERSION, requirement=f"{package.replace('_', '-')}>={MIN_VERSION}"
    )
    return getattr(importlib.import_module(module), name)


class LateBoundBase:
    """A class whose base is a class of Lightning, from the package that the user's Trainer is of.

        class RayLightningEnvironment(LateBoundBase, ClusterEnvironment, base="plugins...."):

    For type checkers the base is named in the usual way too; when the program runs, that name is
    `object`, and making an object gives one of a subclass that has both. `isinstance`, subclasses,
    `super()`, pickle and copy work as usual.
    """

    package: ClassVar[Package]
    """The package that an object is for."""

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
    """Give the subclass of a class of `LateBoundBase` that has its base, of a given package."""
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
