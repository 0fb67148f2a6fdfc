"""What a module of Drawbar shows, without importing it: it may need a framework."""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from pathlib import Path

from drawbar import train
from drawbar.train import v2


def public_names(module: str) -> set[str] | None:
    """Give the names that `drawbar.train`, or a module below it, shows; None if it is not there."""
    if module == train.__name__:
        return {*dir(train), "train"}
    path = module.removeprefix(f"{v2.__name__}.")
    if path in v2.ALIASES:
        return public_names(f"{train.__name__}.{v2.ALIASES[path]}".rstrip("."))
    file = _find_file(module)
    if file is None or any(part.startswith("_") for part in module.split(".")):
        return None
    return _declared_names(file)


def _find_file(module: str) -> Path | None:
    """Find a module's file; none of the packages that it lies in is imported."""
    name, *inner = module.split(".")
    spec = PathFinder.find_spec(name)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _declared_names(path: Path) -> set[str]:
    """Read `__all__`, that of each module that all is imported from, and what is imported as."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=shown)):
                names |= {each.value for each in shown if isinstance(each, ast.Constant)}  # type: ignore[misc]  # they are texts
            case ast.ImportFrom(module=str(other), names=[ast.alias(name="*")]):
                names |= public_names(other) or set()
            case ast.ImportFrom(names=aliases):
                names |= {each.name for each in aliases if each.name == each.asname}
            case _:
                pass
    return names
