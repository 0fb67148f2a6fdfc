"""Find arguments and strings that the user must check or change."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drawbar import train
from drawbar.cli._migrate.ray_names import is_submodule

_TUNE = "ray.tune"
_CONFIGS = ("CheckpointConfig", "DataConfig", "FailureConfig", "RunConfig", "ScalingConfig")
_VARIABLE_REPLACEMENTS = {
    "RAY_TRAIN_CALLBACKS": "use RunConfig(callbacks=)",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "use FailureConfig(hang_timeout=)",
    "RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S": "use FailureConfig(stall_warning_after=)",
    "RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR": "use FailureConfig(hang_timeout=)",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "use FailureConfig(hang_timeout=)",
}


@dataclass(frozen=True)
class MigrationNote:
    """A line that the user must check or change.

    Attributes:
        line: Line in the original script, or in the cell of a notebook, counted from 1.
        text: What to check or change.
        cell: Cell of the notebook, counted from 1; None in a script.
    """

    line: int
    text: str
    cell: int | None = None


def check_config_calls(tree: ast.AST) -> Iterator[MigrationNote]:
    """Yield a note for each config argument that Drawbar does not have."""
    tune_names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and is_submodule(node.module or "", _TUNE)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "Tuner":
            yield from _check_tuner_call(node, tune_names)
        if name not in _CONFIGS or _is_from_tune(node.func, tune_names):
            continue
        for keyword in node.keywords:
            if reason := keyword.arg and _explain_unknown_argument(name, keyword.arg):
                yield MigrationNote(keyword.value.lineno, reason)


def _explain_unknown_argument(config: str, argument: str) -> str | None:
    """Return the error that a config class raises for an unknown argument, or None."""
    try:
        getattr(train, config)(**{argument: None})
    except TypeError as error:
        return str(error) if f" takes no {argument}=" in str(error) else None
    except ValueError:  # the argument exists, but None is not a valid value
        return None
    return None


def _check_tuner_call(call: ast.Call, tune_names: set[str]) -> Iterator[MigrationNote]:
    yield MigrationNote(
        call.lineno, "if Tuner receives a trainer, pass trainer.as_trainable() instead"
    )
    for keyword in call.keywords:
        value = keyword.value
        is_tune_config = isinstance(value, ast.Call) and _is_from_tune(value.func, tune_names)
        if keyword.arg == "run_config" and not is_tune_config:
            text = "Tuner needs RunConfig and CheckpointConfig of ray.tune, not of drawbar.train"
            yield MigrationNote(value.lineno, text)


def _is_from_tune(function: ast.expr, tune_names: set[str]) -> bool:
    """Return whether a config class comes from Ray Tune, which has classes of the same names."""
    if isinstance(function, ast.Attribute):
        return ast.unparse(function.value).split(".")[-1] == "tune"
    return isinstance(function, ast.Name) and function.id in tune_names


def check_torchft_imports(tree: ast.AST) -> Iterator[MigrationNote]:
    """Yield a note for each import of torchft, whose classes need the lighthouse of Ray Train."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                modules = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                continue
        if any(is_submodule(module, "torchft") for module in modules):
            yield MigrationNote(
                node.lineno,
                "use prepare_model(), prepare_optimizer(), and prepare_data_loader() of "
                "drawbar.torch instead of torchft's classes, which find no lighthouse",
            )


def check_strings(tree: ast.AST) -> Iterator[MigrationNote]:
    """Yield a note for each string that refers to Ray Train."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for pattern, explain in _STRING_NOTES:
                if match := pattern.search(node.value):
                    yield MigrationNote(node.lineno, explain(match[0]))


def _explain_variable(name: str) -> str:
    return f"Drawbar does not read {name}; {_VARIABLE_REPLACEMENTS.get(name, 'remove it')}"


_STRING_NOTES: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
    (
        re.compile(r"\bray\.train\b"),
        lambda _: "string contains 'ray.train'; replace it if it is a module name",
    ),
    (re.compile(r"\bRAY_TRAIN_\w+"), _explain_variable),
    (
        re.compile(r"ray_results"),
        lambda _: "Drawbar stores runs in ~/drawbar_results, or in RunConfig(storage_path=...)",
    ),
)
