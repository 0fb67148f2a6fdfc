"""Tests of completion in editors and of `help()` for public names."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jedi
import lightgbm
import pytest
import xgboost

from drawbar import train
from drawbar.torch import TorchTrainer

REPO = Path(__file__).parents[2]
SOURCES = [*REPO.glob("core/**/*.py"), *REPO.glob("integrations/**/*.py")]
Explained = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
HEAD = "from drawbar import train\nfrom drawbar.train.torch import TorchTrainer\n"
WANTED = {
    "train.": {"report", "get_context", "ScalingConfig", "torch", "xgboost"},
    "train.ScalingConfig(num_w": {"num_workers="},
    "TorchTrainer(": {"train_loop_config=", "scaling_config=", "torch_config="},
    "TorchTrainer(print).fit().": {"metrics", "checkpoint", "best_checkpoints", "path"},
}


@pytest.mark.parametrize("typed", WANTED)
def test_editor_completion_offers_public_names(typed: str) -> None:
    offered = {each.name for each in jedi.Script(HEAD + typed).complete()}
    assert WANTED[typed] - offered == set()


@pytest.mark.parametrize(
    "thing", [train.ScalingConfig, train.RunConfig, TorchTrainer, train.report]
)
def test_help_lists_all_arguments(thing: object) -> None:
    text = pydoc.plain(pydoc.render_doc(thing))
    assert callable(thing)
    arguments = [name for name in inspect.signature(thing).parameters if name[0] != "_"]
    assert [name for name in arguments if f"{name}:" not in text] == []


def test_docstring_args_match_signature() -> None:
    """`make docs` checks the same, but needs packages that the tests do not need."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    public = {name for node in nodes for name in _exported(node)}
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    shown = [node for node in nodes if isinstance(node, Explained) and node.name in public]
    assert len(shown) > 100
    unknown = {node.name: set(_explained(node)) - _list_parameters(node, classes) for node in shown}
    assert {name: names for name, names in unknown.items() if names} == {}


def _exported(node: ast.AST) -> list[str]:
    """Return the names that `__all__` lists, if this node sets it."""
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return list(ast.literal_eval(node.value))
    return []


def _explained(node: Explained) -> Iterator[str]:
    """Yield the argument names below "Args:"."""
    _, _, after = (ast.get_docstring(node) or "").partition("\nArgs:\n")
    for line in after.split("\n\n")[0].splitlines():
        if found := re.match(r" {4}(\S.*?): ", line):
            yield found[1].lstrip("*")


def _estimator_arguments(name: str) -> set[str]:
    """Return the arguments of an estimator of LightGBM or XGBoost; {} for another class."""
    estimators = [
        getattr(library, name) for library in (lightgbm, xgboost) if hasattr(library, name)
    ]
    return {argument for each in estimators for argument in inspect.signature(each).parameters}


def _last_part(base: ast.expr) -> str:
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def _list_parameters(node: Explained, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return the arguments of a function or `__init__`, and the fields of a class and its bases."""
    if isinstance(node, ast.ClassDef):
        fields = {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
        made = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        names = [_last_part(base) for base in node.bases]
        bases = [classes[name] for name in names if name in classes]
        makers = [each for each in made if each.name in ("__init__", "__new__")]
        inner: list[Explained] = [*bases, *makers]
        inherited = map(_estimator_arguments, names)
        return fields.union(*(_list_parameters(each, classes) for each in inner), *inherited)
    return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
