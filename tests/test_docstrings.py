"""Docstrings of the public API: complete, in Google style, and with examples."""

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[1]
EXAMPLE = re.compile(r"^\s*(Examples?:|>>> |```)", re.MULTILINE)
RETURNS = re.compile(r"^(Returns|Yields):", re.MULTILINE)


def list_public_modules() -> Iterator[str]:
    for root in (REPO / "core", REPO / "integrations"):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            is_private = any(part.startswith("_") and part != "__init__" for part in parts)
            if not is_private and "\n__all__ = " in path.read_text():
                yield ".".join(parts).removesuffix(".__init__")


def list_documented_parameters(value: Any) -> list[str]:
    """List the parameters that users pass."""
    is_class = inspect.isclass(value)
    if is_class and (
        issubclass(value, BaseException | enum.Enum) or getattr(value, "_is_protocol", False)
    ):
        return []
    if is_class and value.__init__ is object.__init__:
        return []
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in parameters if not name.startswith("_")]


def has_parameter(doc: str, name: str) -> bool:
    pattern = rf"^\s+(\*{{0,2}}\w+, )*\*{{0,2}}{name}(, \*{{0,2}}\w+)*( \([^)]*\))?:"
    return re.search(pattern, doc, re.MULTILINE) is not None


def find_gaps(value: Callable[..., Any]) -> list[str]:
    """List the parts that the docstring of a class or function lacks."""
    doc = inspect.getdoc(value) or ""
    gaps = [name for name in list_documented_parameters(value) if not has_parameter(doc, name)]
    if inspect.isfunction(value):
        returns_value = value.__annotations__.get("return") not in (None, "None")
        if returns_value and not RETURNS.search(doc):
            gaps.append("Returns")
        code = inspect.getsource(value).replace(value.__doc__ or "", "")
        if re.search(r"^    +raise \w", code, re.MULTILINE) and "Raises:" not in doc:
            gaps.append("Raises")
    return gaps if EXAMPLE.search(doc) else [*gaps, "Example"]


@pytest.mark.parametrize("module", sorted(list_public_modules()))
def test_public_docstrings_are_complete(module: str) -> None:
    namespace = importlib.import_module(module)
    assert inspect.getdoc(namespace)
    gaps = {}
    for name in namespace.__all__:
        value = getattr(namespace, name)
        is_defined_here = getattr(value, "__module__", None) == module
        if is_defined_here and callable(value) and (lacking := find_gaps(value)):
            gaps[name] = lacking
    assert gaps == {}
