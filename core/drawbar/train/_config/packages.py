"""Whether a package is installed, new enough, and not hidden by a file of the user's."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder


def require_package(module: str, extra: str, min_version: str | None = None) -> None:
    """Check that a framework is installed, and not too old, without importing it.

    Args:
        module: Top-level module, such as "torch". If `at_least` is given, the package has this name
            too.
        extra: The extra of Drawbar that installs it.
        at_least: The oldest version that works. Default: any.

    Raises:
        ModuleNotFoundError: It is not installed; the message has the command that installs it.
        ImportError: It is too old, or a file of the user's hides it.
    """
    why_not = _find_import_error(module, extra)
    if why_not is not None:
        raise why_not
    if min_version is not None:
        version = importlib.metadata.version(module)
        require_version(module, version, min_version, requirement=f"drawbar[{extra}]")


def make_import_error(module: str, extra: str) -> ImportError:
    """Give the error that says why a framework could not be imported. Raise it from that one.

    Args:
        module: Top-level module, such as "torch".
        extra: The extra of Drawbar that installs it.
    """
    return _find_import_error(module, extra) or ImportError(
        f"{module} is installed here, but cannot be imported as it is; "
        f'run: pip install --upgrade "drawbar[{extra}]"',
        name=module,
    )


def _find_import_error(module: str, extra: str) -> ImportError | None:
    hidden = find_shadowing_file(module)
    if hidden is not None:
        return ImportError(
            f"`import {module}` finds {hidden}, which hides the package {module}; rename it",
            name=module,
            path=hidden,
        )
    if importlib.util.find_spec(module) is None:
        return ModuleNotFoundError(
            f'{module} is not installed here; run: pip install "drawbar[{extra}]"', name=module
        )
    return None


def find_shadowing_file(module: str) -> str | None:
    """Give the file beside the script, or in the working directory, that hides a package.

    Args:
        module: What both are imported as, such as "torch".
    """
    (folder, first), *others = *_find_candidates(module), ("", "")
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    is_users = folder in (os.path.dirname(os.path.abspath(script)), os.getcwd())
    hides = any(other not in ("", first) for _, other in others)
    return first if is_users and hides else None


def _find_candidates(module: str) -> Iterator[tuple[str, str]]:
    """Give what may be imported under a name: its folder and its file, the one that is first."""
    for entry in sys.path:
        spec = PathFinder.find_spec(module, [entry])
        if spec is not None and spec.origin is not None:
            yield os.path.abspath(entry), spec.origin


def require_version(module: str, version: str, min_version: str, *, requirement: str) -> None:
    """Check that a framework is not too old, where its package need not have the module's name.

    Args:
        module: Its module, such as "xgboost".
        found: The version, such as `module.__version__`.
        at_least: The oldest version that works.
        install: What `pip install` is to be told.

    Raises:
        ImportError: It is too old; the message has both versions and the command.
    """
    if parse_release(version) < parse_release(min_version):
        raise ImportError(
            f"{module} {version} is installed here, but {min_version} or newer is needed; "
            f'run: pip install --upgrade "{requirement}"',
            name=module,
        )


def parse_release(version: str) -> tuple[int, ...]:
    """Give the numbers of a version: those before anything like "rc1", ".dev0" or "+cpu"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
