"""Rewrite Ray Train names in Python source code.

The standard library's parser finds the names. Only names with an unambiguous meaning are replaced.
For all others, a note with the line number is added: the user must check or change them. Nothing
else in the source changes.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from drawbar import train
from drawbar.cli._migrate.public_names import public_names

_BYTE_ORDER_MARK = "\ufeff"
_OLD, _NEW, _TUNE = "ray.train", "drawbar.train", "ray.tune"
_AIR = ("ray.air", "ray.air.config")
_TUNE_CALLBACK = "ray.tune.integration.ray_train"
_CONFIGS = ("CheckpointConfig", "DataConfig", "FailureConfig", "RunConfig", "ScalingConfig")
_STRING_NOTES = (
    (
        re.compile(r"\bray\.train\b"),
        "string contains 'ray.train'; replace it if it is a module name",
    ),
    (re.compile(r"\bRAY_TRAIN_\w+"), "Drawbar does not read RAY_TRAIN_* variables"),
    (
        re.compile(r"ray_results"),
        "Drawbar stores runs in ~/drawbar_results, or in RunConfig(storage_path=...)",
    ),
)


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


@dataclass(frozen=True)
class RewriteResult:
    """Text of a rewritten script or notebook, and notes for the user."""

    text: str
    notes: list[MigrationNote]


@dataclass(order=True, frozen=True)
class _Edit:
    """Replacement of bytes `start` to `end` of a line (counted from 1) with `text`."""

    line: int
    start: int
    end: int
    text: str


@dataclass
class _Changes:
    edits: list[_Edit] = field(default_factory=list)
    notes: list[MigrationNote] = field(default_factory=list)


def rewrite(text: str) -> RewriteResult:
    """Rewrite a script.

    Raises:
        SyntaxError: The script is not valid Python.
        ValueError: The script contains a NUL character.
    """
    mark = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else ""
    lines, notes = rewrite_lines(text.removeprefix(mark))
    return RewriteResult(mark + "".join(lines), notes)


def rewrite_lines(text: str) -> tuple[list[str], list[MigrationNote]]:
    """Rewrite a script and return its lines. A rewritten line may contain a line break."""
    tree = parse_source(text)
    lines = text.encode().splitlines(keepends=True)
    changes = _Changes()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        if isinstance(node, ast.Import):
            _plain_import(node, changes)
        else:
            _from_import(node, lines, changes)
    attributes = _replace_attributes(tree, changes)
    _missing_imports(tree, imports, attributes, lines, changes)
    _check_config_calls(tree, changes)
    _check_strings(tree, changes)
    notes = sorted(set(changes.notes), key=lambda note: (note.line, note.text))
    return _apply_edits(lines, changes.edits), notes


def parse_source(text: str) -> ast.Module:
    """Parse a script without syntax warnings.

    Raises:
        SyntaxError: The script is not valid Python.
        ValueError: The script contains a NUL character.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _plain_import(node: ast.Import, changes: _Changes) -> None:
    for alias in node.names:
        if _is_submodule(alias.name, _OLD):
            new = _NEW + alias.name.removeprefix(_OLD)
            changes.edits.append(
                _Edit(alias.lineno, alias.col_offset, alias.col_offset + len(alias.name), new)
            )
            changes.notes += _missing_names(node.lineno, new, ())
        elif _is_submodule(alias.name, "ray.air"):
            changes.notes.append(
                MigrationNote(node.lineno, f"{alias.name}: its names are in drawbar.train")
            )


def _from_import(node: ast.ImportFrom, lines: list[bytes], changes: _Changes) -> None:
    module, names = node.module or "", [alias.name for alias in node.names]
    if node.level:
        return
    if _is_submodule(module, _OLD):
        new = _NEW + module.removeprefix(_OLD)
        _rename_module(node, module, new, lines, changes)
        changes.notes += _missing_names(node.lineno, new, names)
    elif module in _AIR:
        unknown = [name for name in names if name not in train.__all__]
        if unknown:
            text = (
                f"drawbar.train has no {', '.join(unknown)} of {module}; call functions such as "
                "drawbar.train.report"
            )
            changes.notes.append(MigrationNote(node.lineno, text))
        else:
            _rename_module(node, module, _NEW, lines, changes)
    elif module == _TUNE_CALLBACK:
        _rename_module(node, module, "drawbar.tune", lines, changes)
    elif module == "ray" and names == ["train"]:
        _rename_module(node, module, "drawbar", lines, changes)
    elif module == "ray" and "train" in names:
        _split_import(node, lines, changes)


def _is_submodule(module: str, parent: str) -> bool:
    return f"{module}.".startswith(f"{parent}.")


def _rename_module(
    node: ast.ImportFrom, old: str, new: str, lines: list[bytes], changes: _Changes
) -> None:
    written = re.compile(rb"from\s+(" + re.escape(old.encode()) + rb")(?=\s)")
    match = written.match(lines[node.lineno - 1], node.col_offset)
    if match is None:
        changes.notes.append(MigrationNote(node.lineno, f"import from {new} instead of {old}"))
    else:
        changes.edits.append(_Edit(node.lineno, *match.span(1), new))


def _split_import(node: ast.ImportFrom, lines: list[bytes], changes: _Changes) -> None:
    """Move `train` from `from ray import train, tune` to a separate import."""
    others = [alias for alias in node.names if alias.name != "train"]
    (moved,) = [alias for alias in node.names if alias.name == "train"]
    if node.end_lineno != node.lineno:
        text = "move 'from drawbar import train' to a separate line"
        changes.notes.append(MigrationNote(moved.lineno, text))
        return
    both = f"from drawbar import {ast.unparse(moved)}", f"from ray import {_format_aliases(others)}"
    indent = lines[node.lineno - 1][: node.col_offset].decode()
    assert node.end_col_offset is not None  # it comes from a parser
    text = f"{both[0]}\n{indent}{both[1]}" if not indent.strip() else "; ".join(both)
    changes.edits.append(_Edit(node.lineno, node.col_offset, node.end_col_offset, text))


def _format_aliases(names: Iterable[ast.alias]) -> str:
    return ", ".join(map(ast.unparse, names))


def _rebinds_ray(node: ast.AST) -> bool:
    """Return whether a node gives the name `ray` another meaning than the module."""
    match node:
        case ast.arg(arg="ray") | ast.Name(id="ray", ctx=ast.Store()):
            return True
        case ast.FunctionDef(name="ray") | ast.AsyncFunctionDef(name="ray"):
            return True
        case ast.ClassDef(name="ray"):
            return True
        case ast.Import(names) | ast.ImportFrom(names=names):
            return any(alias.asname == "ray" for alias in names) or (
                isinstance(node, ast.ImportFrom) and any(alias.name == "ray" for alias in names)
            )
        case _:
            return False


def _replace_attributes(tree: ast.AST, changes: _Changes) -> list[ast.Attribute]:
    """Replace `ray.train` in expressions. Returns the replaced nodes."""
    replaced = []
    is_shadowed = any(map(_rebinds_ray, ast.walk(tree)))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="ray"), attr="train"):
                assert node.end_col_offset is not None  # it comes from a parser
                if is_shadowed or node.lineno != node.end_lineno:
                    text = (
                        "check manually: 'ray.train' is not replaced, because 'ray' may be "
                        "reassigned or the expression has several lines"
                    )
                    changes.notes.append(MigrationNote(node.lineno, text))
                    continue
                changes.edits.append(_Edit(node.lineno, node.col_offset, node.end_col_offset, _NEW))
                replaced.append(node)
            case _:
                pass
    return replaced


def _missing_imports(
    tree: ast.AST,
    imports: list[ast.Import | ast.ImportFrom],
    attributes: list[ast.Attribute],
    lines: list[bytes],
    changes: _Changes,
) -> None:
    """Add `import drawbar.train` or `import ray` if the rewritten script uses it but lacks it."""
    plain = [
        (node, alias)
        for node in imports
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname is None
    ]
    moved = [node for node, alias in plain if _is_submodule(alias.name, _OLD)]
    unchanged = [
        node
        for node, alias in plain
        if _is_submodule(alias.name, "ray") and not _is_submodule(alias.name, _OLD)
    ]
    replaced = {id(node.value) for node in attributes}
    uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "ray" and id(node) not in replaced
    ]
    if attributes and not moved and unchanged:
        _insert(unchanged[0], f"import {_NEW}", lines, changes)
    if uses and moved and not unchanged:
        _insert(moved[0], "import ray", lines, changes)


def _insert(node: ast.stmt, statement: str, lines: list[bytes], changes: _Changes) -> None:
    indent = lines[node.lineno - 1][: node.col_offset].decode()
    text = f"{statement}\n{indent}" if not indent.strip() else f"{statement}; "
    changes.edits.append(_Edit(node.lineno, node.col_offset, node.col_offset, text))


def _missing_names(line: int, module: str, names: Iterable[str]) -> Iterator[MigrationNote]:
    existing = public_names(module)
    if existing is None:
        text = f"module {module} does not exist; import from drawbar.train"
        yield MigrationNote(line, text)
        return
    for name in names:
        if name not in existing and name != "*":
            yield MigrationNote(line, _missing_name_reason(name, module))


def _missing_name_reason(name: str, module: str) -> str:
    if module == _NEW:
        try:
            getattr(train, name)
        except AttributeError as error:
            if f"no {name}: " in str(error):  # the message names the replacement
                return str(error)
    return f"{module} has no {name}"


def _check_config_calls(tree: ast.AST, changes: _Changes) -> None:
    """Note config arguments that Drawbar does not have."""
    tune_names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and _is_submodule(node.module or "", _TUNE)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "Tuner":
            changes.notes += _check_tuner_call(node, tune_names)
        if name not in _CONFIGS or _is_from_tune(node.func, tune_names):
            continue
        parameters = inspect.signature(getattr(train, name)).parameters
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in parameters:
                text = (
                    f"{name} has no argument {keyword.arg!r}; run the script to see the replacement"
                )
                changes.notes.append(MigrationNote(keyword.value.lineno, text))


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


def _check_strings(tree: ast.AST, changes: _Changes) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [text for pattern, text in _STRING_NOTES if pattern.search(node.value)]
            changes.notes += [MigrationNote(node.lineno, text) for text in texts]


def _apply_edits(lines: list[bytes], edits: list[_Edit]) -> list[str]:
    changed = list(lines)
    for edit in sorted(edits, reverse=True):  # last first, so that earlier offsets stay valid
        line = changed[edit.line - 1]
        changed[edit.line - 1] = line[: edit.start] + edit.text.encode() + line[edit.end :]
    return [line.decode() for line in changed]
