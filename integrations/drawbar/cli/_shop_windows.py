"""What a module of Drawbar shows, without importing it: it may need a framework."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

from drawbar import train


def public_names(module: str) -> set[str] | None:
    """Give the names that `drawbar.train`, or a module below it, shows; None if it is not there."""
    if module == train.__name__:
        return {*dir(train), "train"}
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    except ValueError:  # it has no file: the package that it lies in has made it
        return set(dir(sys.modules[module]))
    if spec is None or spec.origin is None or any(p.startswith("_") for p in module.split(".")):
        return None
    return _shown(Path(spec.origin))


def _shown(path: Path) -> set[str]:
    """Read `__all__`, and that of each module that all is imported from."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=shown)):
                names |= {each.value for each in shown if isinstance(each, ast.Constant)}  # type: ignore[misc]  # they are texts
            case ast.ImportFrom(module=str(other), names=[ast.alias(name="*")]):
                names |= public_names(other) or set()
            case _:
                pass
    return names
