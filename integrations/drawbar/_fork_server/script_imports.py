"""Find the imports that a script does first, so that they can be done before it runs.

`program_server.py` imports this file by path; it uses only the standard library.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

_HARMLESS_MODULES = ("drawbar.train", "tqdm")
"""Modules, with submodules, whose import changes nothing that a later import could depend on."""


def find_script_directory(arguments: Sequence[str]) -> str:
    """Return the first entry of `sys.path` in `python ARGUMENTS`, without PYTHONSAFEPATH."""
    return os.getcwd() if arguments[0] == "-m" else os.path.dirname(os.path.realpath(arguments[0]))


def find_script_files(arguments: Sequence[str]) -> list[str]:
    """Return the files that `python ARGUMENTS` runs: the script, or a module after its packages.

    Returns:
        The files in the order in which they run. Nothing if the module is not found.
    """
    if arguments[0] != "-m":
        return [os.path.abspath(arguments[0])]
    top, *parts = arguments[1].split(".")
    spec = PathFinder.find_spec(top, [find_script_directory(arguments), *sys.path])
    spec = spec or find_spec(top)
    files: list[str] = []
    for part in (*parts, "__main__"):
        if spec is None or spec.submodule_search_locations is None:
            break  # a module without submodules
        files += _list_source(spec)
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return [*files, *_list_source(spec)] if spec is not None else []


def _list_source(spec: ModuleSpec) -> list[str]:
    # A namespace package has no file.
    return [spec.origin] if spec.origin is not None else []


def find_imports(files: Sequence[str], directory: str, packages: Collection[str]) -> dict[str, str]:
    """Find the imports that nothing in the files can influence.

    These are the imports of `packages` at the beginning. Only imports of the standard library and
    `_HARMLESS_MODULES`, and constants, may come before them: other statements and other modules can
    change the environment, `sys.path`, or the packages.

    Args:
        files: Files in the order in which they run.
        directory: Directory of the script, whose modules hide others with the same name.
        packages: Names of the packages that may be imported.

    Returns:
        Source code of the imports, with the original line numbers, by file.
    """
    sources = {}
    for file in files:
        lines: dict[int, list[str]] = {}
        is_complete = _select(_parse(file), directory, packages, lines)
        if lines:
            sources[file] = "\n".join(
                "; ".join(lines.get(number, [])) for number in range(1, max(lines) + 1)
            )
        if not is_complete:
            break
    return sources


def _parse(file: str) -> list[ast.stmt]:
    try:
        with open(file, "rb") as source, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script itself shows them
            return ast.parse(source.read()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return [ast.Pass()]  # the script itself fails


def _select(
    body: list[ast.stmt],
    directory: str,
    packages: Collection[str],
    lines: dict[int, list[str]],
) -> bool:
    """Add the imports to `lines`, and return whether all statements are known."""
    for statement in body:
        if isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            modules = [f"{statement.module}.{alias.name}" for alias in statement.names]
        elif _is_constant(statement):
            continue
        else:
            return False
        roots = [module.partition(".")[0] for module in modules]
        if any(is_local(root, directory) for root in roots):
            return False
        if not all(_is_harmless(module, packages) for module in modules):
            return False
        if any(root in packages for root in roots):
            lines.setdefault(statement.lineno, []).append(ast.unparse(statement))
    return True


def _is_harmless(module: str, packages: Collection[str]) -> bool:
    """Return whether the import of a module has no influence on later imports of packages."""
    root = module.partition(".")[0]
    return (
        root in packages
        or root in sys.stdlib_module_names
        or any(f"{module}.".startswith(f"{name}.") for name in _HARMLESS_MODULES)
    )


def _is_constant(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring or assigns a constant to a name."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign):
        is_name = all(isinstance(target, ast.Name) for target in statement.targets)
        return is_name and isinstance(statement.value, ast.Constant)
    return False


def is_local(name: str, directory: str) -> bool:
    """Return whether a module is in the directory of the script, so that no other one is used."""
    spec = PathFinder.find_spec(name, [directory])
    return spec is not None and spec.origin is not None
