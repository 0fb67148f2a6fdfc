"""List the public names of a module without importing it, which may need a framework."""

from __future__ import annotations

import ast
import functools
from importlib.machinery import PathFinder
from pathlib import Path

from drawbar import train


@functools.cache
def public_names(module: str) -> set[str] | None:
    """Return the public names of `drawbar.train` or a submodule; None if it does not exist."""
    if module == train.__name__:
        return {*dir(train), "train"}
    file = _find_file(module)
    if file is None or any(part.startswith("_") for part in module.split(".")):
        return None
    return _declared_names(file)


def _find_file(module: str) -> Path | None:
    """Find the file of a module without importing its parent packages."""
    name, *submodules = module.split(".")
    spec = PathFinder.find_spec(name)
    for part in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _declared_names(path: Path) -> set[str]:
    """Return `__all__`, the names of star imports, and names imported as themselves."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=elements)):
                names |= {item.value for item in elements if isinstance(item, ast.Constant)}  # type: ignore[misc]  # they are strings
            case ast.ImportFrom(module=str(other), names=[ast.alias(name="*")]):
                names |= public_names(other) or set()
            case ast.ImportFrom(names=aliases):
                names |= {alias.name for alias in aliases if alias.name == alias.asname}
            case _:
                pass
    return names
