"""Tests of the public modules: `__all__`, docstrings, return types, and pickling."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
import pydoc
import subprocess
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import drawbar.train
from tests.train.runs import fit

MODULES = [
    drawbar.train,
    *(
        importlib.import_module(f"drawbar.train.{found.name}")
        for found in pkgutil.iter_modules(drawbar.train.__path__)
        if not found.name.startswith("_") and found.name not in drawbar.train._INTEGRATIONS
    ),
]
NAMES = [(module, name) for module in MODULES for name in module.__all__]


def constants_classes_functions(name: str) -> tuple[bool, bool, str]:
    """The order that ruff keeps."""
    return not name.isupper(), not name[0].isupper(), name


def is_own(module: ModuleType, value: Any) -> bool:
    """Return whether a value is defined in this module or, for a package, in a part of it."""
    return str(getattr(value, "__module__", "")).startswith(module.__name__)


def members(kind: type) -> list[tuple[str, Any]]:
    """The public functions and properties that a class defines itself."""
    return [
        (name, value)
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and isinstance(value, property | classmethod | staticmethod | type(is_own))
    ]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_public_all_is_sorted_and_names_exist(module: ModuleType) -> None:
    assert module.__all__ == sorted(set(module.__all__), key=constants_classes_functions)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_dir_of_package_lists_only_public_names() -> None:
    assert dir(drawbar.train) == sorted({*drawbar.train.__all__, *drawbar.train._INTEGRATIONS})


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_public_all_contains_all_public_classes_and_functions(module: ModuleType) -> None:
    classes_and_functions = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and is_own(module, value)
    }
    assert classes_and_functions - set(module.__all__) == set()


@pytest.mark.parametrize(
    ("module", "name"), NAMES, ids=lambda each: getattr(each, "__name__", each)
)
def test_public_names_have_docstrings(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return  # a constant or a type alias, which has its docstring in the source
    generated = f"{name}(" if inspect.isclass(value) else None
    doc = value.__doc__ or ""
    assert doc
    assert not (generated and doc.startswith(generated)), "the docstring is dataclass's own"


@pytest.mark.parametrize(
    ("module", "name"), NAMES, ids=lambda each: getattr(each, "__name__", each)
)
def test_public_methods_have_docstrings_and_return_types(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    found = members(value) if inspect.isclass(value) else []
    for member, part in found:
        function = getattr(part, "fget", None) or getattr(part, "__func__", part)
        inherited = any(hasattr(base, member) for base in value.__bases__)
        assert function.__doc__ or inherited, f"{name}.{member} has no docstring"
        assert "return" in function.__annotations__, f"{name}.{member} has no return type"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_public_modules_have_docstrings(module: ModuleType) -> None:
    assert module.__doc__


def test_public_names_are_defined_in_the_package() -> None:
    for name in drawbar.train.__all__:
        value = getattr(drawbar.train, name)
        is_constant = name.isupper()
        assert is_constant or inspect.ismodule(value) or is_own(drawbar.train, value), name


@pytest.mark.parametrize(
    ("module", "name"), NAMES, ids=lambda each: getattr(each, "__name__", each)
)
def test_public_classes_and_functions_pickle_by_public_module(
    module: ModuleType, name: str
) -> None:
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert "._" not in value.__module__
        assert pickle.loads(pickle.dumps(value)) is value


def test_classes_of_results_have_public_names_before_their_first_use(tmp_path: Path) -> None:
    fit(lambda: drawbar.train.report({"loss": 1}), tmp_path)
    code = (
        "from drawbar.train import runs\n"
        f"run = runs.find_run({str(tmp_path / 'run')!r})\n"
        "print(type(run.timeline), type(run.timeline.attempts[0]), type(run.goodput))"
    )
    names = ("Timeline", "AttemptTimes", "Goodput")
    shown = " ".join(f"<class 'drawbar.train.{name}'>" for name in names)
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == shown


def test_type_hints_of_public_classes_are_resolved() -> None:
    hints = typing.get_type_hints(drawbar.train.RunConfig)
    assert hints["failure_config"] is drawbar.train.FailureConfig
    assert hints["callbacks"] == Sequence[drawbar.train.UserCallback]
    assert typing.get_type_hints(drawbar.train.ReportedCheckpoint)["metrics"] == dict[str, Any]


def test_getsource_of_public_functions_and_methods_works() -> None:
    assert inspect.getsource(drawbar.train.report).startswith("def report(")
    fit = drawbar.train.DataParallelTrainer.fit
    assert inspect.getsource(fit).lstrip().startswith("def fit(self")
    text = pydoc.plain(pydoc.render_doc(drawbar.train.RunConfig))
    assert "class RunConfig" in text
