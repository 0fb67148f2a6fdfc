"""Rewrite Ray Train names in Python source code.

The standard library's parser finds the names. Only names with an unambiguous meaning are replaced.
For all others, a note with the line number is added: the user must check or change them. Nothing
else in the source changes.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from drawbar.cli._migrate.checks import (
    MigrationNote,
    check_config_calls,
    check_strings,
    check_torchft_imports,
)
from drawbar.cli._migrate.ray_names import (
    AIR,
    NEW,
    OLD,
    explain_air_import,
    explain_missing_names,
    is_submodule,
    is_train_module,
    rename_module,
    rename_other_module,
)

_BYTE_ORDER_MARK = "\ufeff"
_IN_AIR = f"its names are in {NEW}"


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

    def add_notes(self, node: ast.stmt | ast.expr | ast.alias, texts: Iterable[str]) -> None:
        """Add notes on the line of a node."""
        self.notes += [MigrationNote(node.lineno, text) for text in texts]


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
    for check in (check_config_calls, check_torchft_imports, check_strings):
        changes.notes += check(tree)
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
        if is_submodule(alias.name, OLD):
            new = rename_module(alias.name)
            end = alias.col_offset + len(alias.name)
            changes.edits.append(_Edit(alias.lineno, alias.col_offset, end, new))
            changes.add_notes(node, explain_missing_names(new, ()))
        elif is_submodule(alias.name, AIR):
            changes.add_notes(node, [f"{alias.name}: {_IN_AIR}"])


def _from_import(node: ast.ImportFrom, lines: list[bytes], changes: _Changes) -> None:
    module, names = node.module or "", [alias.name for alias in node.names]
    if node.level:
        return
    if is_submodule(module, OLD):
        new = rename_module(module, names)
        _rename_module(node, module, new, lines, changes)
        changes.add_notes(node, explain_missing_names(new, names))
    elif other := rename_other_module(module, names):
        _rename_module(node, module, other, lines, changes)
    elif is_submodule(module, AIR):
        changes.add_notes(node, [explain_air_import(module, names)])
    elif module == "ray" and names == ["train"]:
        _rename_module(node, module, "drawbar", lines, changes)
    elif module == "ray":
        if "train" in names:
            _split_import(node, lines, changes)
        if "air" in names:
            changes.add_notes(node, [f"{AIR}: {_IN_AIR}"])


def _rename_module(
    node: ast.ImportFrom, old: str, new: str, lines: list[bytes], changes: _Changes
) -> None:
    written = re.compile(rb"from\s+(" + re.escape(old.encode()) + rb")(?=\s)")
    match = written.match(lines[node.lineno - 1], node.col_offset)
    if match is None:
        changes.add_notes(node, [f"import from {new} instead of {old}"])
    else:
        changes.edits.append(_Edit(node.lineno, *match.span(1), new))


def _split_import(node: ast.ImportFrom, lines: list[bytes], changes: _Changes) -> None:
    """Move `train` from `from ray import train, tune` to a separate import."""
    others = [alias for alias in node.names if alias.name != "train"]
    (moved,) = [alias for alias in node.names if alias.name == "train"]
    if node.end_lineno != node.lineno:
        changes.add_notes(moved, ["move 'from drawbar import train' to a separate line"])
        return
    both = f"from drawbar import {ast.unparse(moved)}", f"from ray import {_format_aliases(others)}"
    indent = lines[node.lineno - 1][: node.col_offset].decode()
    assert node.end_col_offset is not None  # it comes from a parser
    text = f"{both[0]}\n{indent}{both[1]}" if not indent.strip() else "; ".join(both)
    changes.edits.append(_Edit(node.lineno, node.col_offset, node.end_col_offset, text))


def _format_aliases(names: Iterable[ast.alias]) -> str:
    return ", ".join(map(ast.unparse, names))


def _rebinds(node: ast.AST, name: str) -> bool:
    """Return whether a node gives a name of a module another meaning, apart from imports."""
    match node:
        case ast.arg(arg=other) | ast.Name(id=other, ctx=ast.Store()):
            return other == name
        case ast.FunctionDef(name=other) | ast.AsyncFunctionDef(name=other):
            return other == name
        case ast.ClassDef(name=other):
            return other == name
        case _:
            return False


def _imports_as_ray(node: ast.AST) -> bool:
    """Return whether a node imports another object under the name `ray`."""
    match node:
        case ast.Import(names):
            return any(alias.asname == "ray" for alias in names)
        case ast.ImportFrom(names=names):
            return any("ray" in (alias.name, alias.asname) for alias in names)
        case _:
            return False


def _train_modules_by_name(tree: ast.AST) -> dict[str, str]:
    """Return the names that the script gives to Ray Train's modules, for example `train`."""
    modules = dict[str, str]()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                modules |= {alias.asname: alias.name for alias in names if alias.asname}
            case ast.ImportFrom(module=str(parent), names=names, level=0):
                modules |= {alias.asname or alias.name: f"{parent}.{alias.name}" for alias in names}
            case _:
                pass
    return {
        name: module
        for name, module in modules.items()
        if is_train_module(module) and not any(_rebinds(node, name) for node in ast.walk(tree))
    }


def _replace_attributes(tree: ast.AST, changes: _Changes) -> list[ast.expr]:
    """Replace modules of Ray Train in expressions. Returns the replaced `ray.train` nodes."""
    replaced = list[ast.expr]()
    modules = _train_modules_by_name(tree)
    is_shadowed = any(_rebinds(node, "ray") or _imports_as_ray(node) for node in ast.walk(tree))
    parents = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="ray"), attr="air") if not is_shadowed:
                changes.add_notes(node, [f"{AIR}: {_IN_AIR}"])
            case ast.Attribute(value=ast.Name(id="ray"), attr="train"):
                if is_shadowed or node.lineno != node.end_lineno:
                    text = (
                        "check manually: 'ray.train' is not replaced, because 'ray' may be "
                        "reassigned or the expression has several lines"
                    )
                    changes.add_notes(node, [text])
                    continue
                _replace_module(node, OLD, NEW, parents, changes)
                replaced.append(node)
            case ast.Name(id=name) if name in modules:
                _replace_module(node, modules[name], name, parents, changes)
            case _:
                pass
    return replaced


def _replace_module(
    node: ast.expr, module: str, text: str, parents: dict[int, ast.Attribute], changes: _Changes
) -> None:
    """Replace an expression for a module of Ray Train, and check the name that it is used for.

    Args:
        node: Expression for `module`. The submodules that follow it are replaced too.
        module: Module of Ray Train.
        text: Expression for the same module of Drawbar.
        parents: Attributes by the identity of their values.
        changes: Receives the edit and the notes.
    """
    end, path = node, module
    while (parent := parents.get(id(end))) and is_train_module(f"{path}.{parent.attr}"):
        end, path = parent, f"{path}.{parent.attr}"
    new, old_text = rename_module(path), ast.unparse(end)
    new_text = text + new.removeprefix(rename_module(module))
    if new_text != old_text:
        if end.lineno != end.end_lineno or not is_submodule(new, rename_module(module)):
            changes.add_notes(node, [f"check manually: {old_text} is {new}"])
        else:
            assert end.end_col_offset is not None  # it comes from a parser
            changes.edits.append(_Edit(end.lineno, end.col_offset, end.end_col_offset, new_text))
    if parent is not None:
        changes.add_notes(parent, explain_missing_names(new, [parent.attr]))


def _missing_imports(
    tree: ast.AST,
    imports: list[ast.Import | ast.ImportFrom],
    attributes: list[ast.expr],
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
    moved = [node for node, alias in plain if is_submodule(alias.name, OLD)]
    unchanged = [
        node
        for node, alias in plain
        if is_submodule(alias.name, "ray") and not is_submodule(alias.name, OLD)
    ]
    replaced = {id(node.value) for node in attributes if isinstance(node, ast.Attribute)}
    uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "ray" and id(node) not in replaced
    ]
    if attributes and not moved and unchanged:
        _insert(unchanged[0], f"import {NEW}", lines, changes)
    if uses and moved and not unchanged:
        _insert(moved[0], "import ray", lines, changes)


def _insert(node: ast.stmt, statement: str, lines: list[bytes], changes: _Changes) -> None:
    indent = lines[node.lineno - 1][: node.col_offset].decode()
    text = f"{statement}\n{indent}" if not indent.strip() else f"{statement}; "
    changes.edits.append(_Edit(node.lineno, node.col_offset, node.col_offset, text))


def _apply_edits(lines: list[bytes], edits: list[_Edit]) -> list[str]:
    changed = list(lines)
    for edit in sorted(edits, reverse=True):  # last first, so that earlier offsets stay valid
        line = changed[edit.line - 1]
        changed[edit.line - 1] = line[: edit.start] + edit.text.encode() + line[edit.end :]
    return [line.decode() for line in changed]
