"""Private APIs of other projects are used in one file of each package only.

These files are `_base/ray_compat.py` of the core, and `_compat.py` of each integration. Their tests
fail when another project changes the API.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
OWN_ROOTS = {"drawbar", "tests", "benchmarks"}
COMPAT_FILES = {
    "_compat.py",
    "ray_compat.py",
    "_ray_compat.py",
    "test_compat.py",
    "test_ray_compat.py",
}
RAY_PRIVATE_FILES = {
    "core/drawbar/_base/ray_compat.py",
    "tests/_ray_compat.py",
    "tests/train/test_ray_compat.py",
}
PRIVATE_PACKAGES = ("keras.src", "tf_keras.src", "ray._private")
FILES = sorted(
    path
    for directory in ("core", "integrations", "tests", "benchmarks")
    for path in (REPO / directory).rglob("*.py")
)
PRODUCT_FILES = [
    path for path in FILES if path.relative_to(REPO).parts[0] in ("core", "integrations")
]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def is_other_project(module: str) -> bool:
    root = module.partition(".")[0]
    return root not in OWN_ROOTS and root not in sys.stdlib_module_names and root != "_typeshed"


def has_private_part(module: str) -> bool:
    return any(map(is_private, module.split("."))) or module.startswith(PRIVATE_PACKAGES)


def private_imports(tree: ast.Module) -> Iterator[str]:
    """Yield imports of private modules and private names of other projects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            if is_other_project(module) and has_private_part(module):
                yield f"{node.lineno}: import {module}"


def private_module_attributes(tree: ast.Module) -> Iterator[str]:
    """Yield private attributes of imported modules and names of other projects."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if is_other_project(alias.name)
            }
        elif isinstance(node, ast.ImportFrom) and is_other_project(str(node.module)):
            names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            if isinstance(root, ast.Name) and root.id in names:
                yield f"{node.lineno}: {ast.unparse(node)}"


def defined_names(tree: ast.AST) -> set[str]:
    """Return functions, classes, variables, and attributes of `self` that a file defines.

    Protocols are left out: they describe classes of other projects.
    """
    names = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            names.add(node.attr)
        names |= defined_names(node)
    return names


@functools.cache
def all_defined_names() -> frozenset[str]:
    return frozenset().union(*(defined_names(parse(path)) for path in PRODUCT_FILES))


def foreign_attributes(tree: ast.Module) -> Iterator[str]:
    """Yield private attributes of objects whose class is not defined in this file."""
    own = defined_names(tree)
    standard = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in sys.stdlib_module_names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            known = all_defined_names() if owner in ("self", "cls", "super()") else own
            if node.attr not in known and owner not in standard:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith(PRIVATE_PACKAGES):
                yield f"{node.lineno}: {node.value}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)) and name not in own | {"_fields"}:  # of named tuples
                yield f"{node.lineno}: {ast.unparse(node)}"


def show(path: Path, found: Iterator[str]) -> list[str]:
    return [f"{path.relative_to(REPO)}:{use}" for use in found]


def test_private_apis_are_imported_in_compat_files_only() -> None:
    wrong = [
        use
        for path in FILES
        if path.name not in COMPAT_FILES
        for find in (private_imports, private_module_attributes)
        for use in show(path, find(parse(path)))
    ]
    assert wrong == []


def test_private_attributes_of_other_projects_are_used_in_compat_files_only() -> None:
    wrong = [
        use
        for path in PRODUCT_FILES
        if path.name not in COMPAT_FILES
        for use in show(path, foreign_attributes(parse(path)))
    ]
    assert wrong == []


def test_ray_private_is_imported_in_ray_compat_only() -> None:
    wrong = [
        use
        for path in FILES
        if str(path.relative_to(REPO)) not in RAY_PRIVATE_FILES
        for find in (private_imports, private_module_attributes)
        for use in show(path, find(parse(path)))
        if "ray._private" in use
    ]
    assert wrong == []


def test_private_apis_are_not_imported_with_compat_files() -> None:
    """`import drawbar.xgboost` must not fail because XGBoost has removed a private name."""
    wrong = [
        f"{path.relative_to(REPO)}:{use}"
        for path in PRODUCT_FILES
        if path.name in COMPAT_FILES
        for node in parse(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for use in private_imports(ast.Module([node], []))
    ]
    assert wrong == []


def test_import_without_private_names_succeeds_and_use_raises() -> None:
    names = sorted(
        tuple(map(ast.literal_eval, node.args))
        for path in PRODUCT_FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_private"
    )
    packages = sorted({module.partition(".")[0] for module, _ in names})
    assert {"lightgbm", "ray", "torch", "xgboost"} <= set(packages)
    program = f"""
import importlib
from drawbar._base import packages as packages
import lightgbm.sklearn, ray.tune, torch.utils._pytree, xgboost.sklearn
for module, name in {names}:
    delattr(importlib.import_module(module), name)
import drawbar.lightgbm, drawbar.torch, drawbar.tune, drawbar.xgboost
try:
    drawbar.lightgbm.LightGBMTrainer(params={{}}, label_column="y", datasets={{"train": print}})
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("Drawbar needs lightgbm.basic._ConfigAliases, which "), done


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import ray._private.state", 1),
        ("from ray._private import state", 1),
        ("from lightgbm.basic import _LIB", 1),
        ("import keras.src.utils", 1),
        ("import ray\nray._private.worker", 1),
        ("import torch.distributed as dist\ndist.distributed_c10d._world", 1),
        ("from tune import Logger\nLogger()._restore()", 1),
        ("import importlib\nimportlib.import_module('keras.src.utils')", 1),
        ("def f(x): return x._config", 1),
        ("def f(x): return getattr(x, '_config', None)", 1),
        ("class A:\n    def f(self): return self._attribute_of_another_project", 1),
        ("from typing import Protocol\nclass A(Protocol):\n    _a: int\ndef f(x): x._a", 1),
        ("import os\nos._exit(0)", 0),
        ("class A:\n    _a = 1\ndef f(x): return x._a", 0),
        ("from drawbar._base import ray_compat\nray_compat.f", 0),
        ("import ray\nray.__version__", 0),
    ],
)
def test_finders_find_private_apis(source: str, expected: int) -> None:
    tree = ast.parse(source)
    uses = {
        use.partition(":")[0]
        for find in (private_imports, private_module_attributes, foreign_attributes)
        for use in find(tree)
    }
    assert len(uses) == expected
