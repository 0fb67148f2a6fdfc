"""Check that a package is installed, new enough, and not shadowed by a user's file."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder


def require_package(module: str, extra: str, min_version: str | None = None) -> None:
    """Check that a framework is installed and new enough, without importing it.

    Args:
        module: Top-level module, such as "torch". With `min_version`, also the package name.
        extra: Extra of Drawbar that installs the framework.
        min_version: Oldest supported version. Default: any.

    Raises:
        ModuleNotFoundError: The framework is not installed. The message contains the command that
            installs it.
        ImportError: The framework is too old, or a user's file shadows it.

    Example:
        ```python
        require_package("torch", extra="torch", min_version="2.4")
        ```
    """
    error = _find_import_error(module, extra)
    if error is not None:
        raise error
    if min_version is not None:
        version = importlib.metadata.version(module)
        require_version(module, version, min_version)


def make_import_error(module: str, extra: str) -> ImportError:
    """Return an error that explains why a framework could not be imported.

    Args:
        module: Top-level module, such as "torch".
        extra: Extra of Drawbar that installs the framework.

    Returns:
        The error, to be raised from the original one.

    Example:
        ```python
        try:
            import torch
        except ImportError as error:
            raise make_import_error("torch", extra="torch") from error
        ```
    """
    return _find_import_error(module, extra) or ImportError(
        f"{module} is installed, but cannot be imported; "
        f"run: pip install --upgrade {_format_requirements(module, extra)}",
        name=module,
    )


def _find_import_error(module: str, extra: str) -> ImportError | None:
    path = find_shadowing_file(module)
    if path is not None:
        return ImportError(
            f"`import {module}` finds {path}, which hides the package {module}; rename it",
            name=module,
            path=path,
        )
    if importlib.util.find_spec(module) is None:
        return ModuleNotFoundError(
            f"{module} is not installed; run: pip install {_format_requirements(module, extra)}",
            name=module,
        )
    return None


def _format_requirements(module: str, extra: str) -> str:
    """Return arguments of `pip install`: the packages of an extra that are not installed.

    The packages, unlike the extra, can be installed by the same command however Drawbar itself was
    installed: from a checkout, a file, or an index. If all are installed, all are returned.
    """
    packages = list(dict.fromkeys(_list_packages(extra))) or [module]
    missing = [package for package in packages if not _is_installed(package)]
    return " ".join(f'"{package}"' for package in missing or packages)


def _list_packages(extra: str) -> Iterator[str]:
    """Yield the requirements of an extra of Drawbar. None if Drawbar is not a package."""
    from packaging.requirements import Requirement  # a dependency of Ray

    try:
        lines = importlib.metadata.requires("drawbar") or ()
    except importlib.metadata.PackageNotFoundError:  # in PYTHONPATH or py_modules
        return
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if not marker or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue  # required without the extra, or not by it
        if requirement.name == "drawbar":
            for other in sorted(requirement.extras):
                yield from _list_packages(other)
        else:
            requirement.marker = None
            yield str(requirement)


def _is_installed(package: str) -> bool:
    from packaging.requirements import Requirement

    requirement = Requirement(package)
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def find_shadowing_file(module: str) -> str | None:
    """Return the user's file that shadows a package, or None.

    Only files in the directory of the script and in the working directory count.

    Args:
        module: Top-level module, such as "torch".
    """
    (directory, first), *others = *_find_candidates(module), ("", "")
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    is_user_file = directory in (os.path.dirname(os.path.abspath(script)), os.getcwd())
    shadows_package = any(other not in ("", first) for _, other in others)
    return first if is_user_file and shadows_package else None


def _find_candidates(module: str) -> Iterator[tuple[str, str]]:
    """Yield the directory and file of each module of this name, in import order."""
    for entry in sys.path:
        spec = PathFinder.find_spec(module, [entry])
        if spec is not None and spec.origin is not None:
            yield os.path.abspath(entry), spec.origin


def require_version(module: str, version: str, min_version: str) -> None:
    """Check that a framework is new enough, if its package may have another name.

    Args:
        module: Module of the framework, such as "xgboost".
        version: Installed version, such as `module.__version__`.
        min_version: Oldest supported version.

    Raises:
        ImportError: The version is too old. The message contains both versions, and the command
            that upgrades the installed package.

    Example:
        ```python
        require_version("xgboost", xgboost.__version__, "3.1")
        ```
    """
    if parse_release(version) < parse_release(min_version):
        package, *_ = importlib.metadata.packages_distributions().get(module, [module])
        raise ImportError(
            f"{module} {version} is installed, but {min_version} or newer is needed; "
            f'run: pip install --upgrade "{package}>={min_version}"',
            name=module,
        )


def parse_release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, without suffixes such as "rc1" or "+cpu"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
