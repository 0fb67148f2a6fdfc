"""A script for Ray Train as one for Drawbar: names are replaced where they stand, all else stays.

The parser of the standard library says where they stand. A name is only replaced where it is sure
what it means; the rest is listed with line numbers, for people to decide.
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
_IN_TEXT = (
    (re.compile(r"\bray\.train\b"), "text names ray.train; should it name drawbar.train?"),
    (re.compile(r"\bRAY_TRAIN_\w+"), "no environment variable changes what Drawbar does"),
    (re.compile(r"ray_results"), "runs lie in ~/drawbar_results, or RunConfig(storage_path=)"),
)


@dataclass(frozen=True)
class MigrationNote:
    """What a person must decide: the line in the script as it was, and what about it.

    In a notebook it is the line in a cell; cells are counted from 1.
    """

    line: int
    text: str
    cell: int | None = None


@dataclass(frozen=True)
class RewriteResult:
    """A script or a notebook, rewritten, and what is left to people."""

    text: str
    notes: list[MigrationNote]


@dataclass(order=True, frozen=True)
class _Edit:
    """Bytes `start` to `end` of a line, counted from 1, become `text`."""

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
        SyntaxError, ValueError: It is no Python.
    """
    mark = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else ""
    lines, notes = rewrite_lines(text.removeprefix(mark))
    return RewriteResult(mark + "".join(lines), notes)


def rewrite_lines(text: str) -> tuple[list[str], list[MigrationNote]]:
    """Do so, and give what has become of each line, which may be two."""
    tree = parse_source(text)
    lines = text.encode().splitlines(keepends=True)
    found = _Changes()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        if isinstance(node, ast.Import):
            _plain_import(node, found)
        else:
            _from_import(node, lines, found)
    attributes = _replace_attributes(tree, found)
    _missing_imports(tree, imports, attributes, lines, found)
    _check_config_calls(tree, found)
    _check_strings(tree, found)
    notes = sorted(set(found.notes), key=lambda note: (note.line, note.text))
    return _apply_edits(lines, found.edits), notes


def parse_source(text: str) -> ast.Module:
    """Parse a script, without a word about what is odd in it.

    Raises:
        SyntaxError, ValueError: It is no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _plain_import(node: ast.Import, found: _Changes) -> None:
    for each in node.names:
        if _is_submodule(each.name, _OLD):
            new = _NEW + each.name.removeprefix(_OLD)
            found.edits.append(
                _Edit(each.lineno, each.col_offset, each.col_offset + len(each.name), new)
            )
            found.notes += _missing_names(node.lineno, new, ())
        elif _is_submodule(each.name, "ray.air"):
            found.notes.append(
                MigrationNote(node.lineno, f"{each.name}: its names are in drawbar.train")
            )


def _from_import(node: ast.ImportFrom, lines: list[bytes], found: _Changes) -> None:
    module, names = node.module or "", [each.name for each in node.names]
    if node.level:
        return
    if _is_submodule(module, _OLD):
        new = _NEW + module.removeprefix(_OLD)
        _rename_module(node, module, new, lines, found)
        found.notes += _missing_names(node.lineno, new, names)
    elif module in _AIR:
        unknown = [name for name in names if name not in train.__all__]
        if unknown:
            what = f"{module}: {', '.join(unknown)}: call drawbar.train.report and the like"
            found.notes.append(MigrationNote(node.lineno, what))
        else:
            _rename_module(node, module, _NEW, lines, found)
    elif module == _TUNE_CALLBACK:
        _rename_module(node, module, "drawbar.tune", lines, found)
    elif module == "ray" and names == ["train"]:
        _rename_module(node, module, "drawbar", lines, found)
    elif module == "ray" and "train" in names:
        _split_import(node, lines, found)


def _is_submodule(module: str, parent: str) -> bool:
    return f"{module}.".startswith(f"{parent}.")


def _rename_module(
    node: ast.ImportFrom, old: str, new: str, lines: list[bytes], found: _Changes
) -> None:
    written = re.compile(rb"from\s+(" + re.escape(old.encode()) + rb")(?=\s)")
    match = written.match(lines[node.lineno - 1], node.col_offset)
    if match is None:
        found.notes.append(MigrationNote(node.lineno, f"import from {new} instead of {old}"))
    else:
        found.edits.append(_Edit(node.lineno, *match.span(1), new))


def _split_import(node: ast.ImportFrom, lines: list[bytes], found: _Changes) -> None:
    """Take `train` out of `from ray import train, tune`, into a line of its own."""
    kept = [each for each in node.names if each.name != "train"]
    (moved,) = [each for each in node.names if each.name == "train"]
    if node.end_lineno != node.lineno:
        text = "import train from drawbar, in a line of its own"
        found.notes.append(MigrationNote(moved.lineno, text))
        return
    both = f"from drawbar import {ast.unparse(moved)}", f"from ray import {_format_aliases(kept)}"
    indent = lines[node.lineno - 1][: node.col_offset].decode()
    assert node.end_col_offset is not None  # it comes from a parser
    text = f"{both[0]}\n{indent}{both[1]}" if not indent.strip() else "; ".join(both)
    found.edits.append(_Edit(node.lineno, node.col_offset, node.end_col_offset, text))


def _format_aliases(names: Iterable[ast.alias]) -> str:
    return ", ".join(map(ast.unparse, names))


def _replace_attributes(tree: ast.AST, found: _Changes) -> list[ast.Attribute]:
    """Replace `ray.train` where it is an expression; gives those."""
    replaced = []
    shadowed = any(
        (isinstance(node, ast.arg) and node.arg == "ray")
        or (isinstance(node, ast.Name) and node.id == "ray" and isinstance(node.ctx, ast.Store))
        for node in ast.walk(tree)
    )
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="ray"), attr="train"):
                assert node.end_col_offset is not None  # it comes from a parser
                if shadowed or node.lineno != node.end_lineno:
                    found.notes.append(
                        MigrationNote(node.lineno, "is this ray.train the module's?")
                    )
                    continue
                found.edits.append(_Edit(node.lineno, node.col_offset, node.end_col_offset, _NEW))
                replaced.append(node)
            case _:
                pass
    return replaced


def _missing_imports(
    tree: ast.AST,
    imports: list[ast.Import | ast.ImportFrom],
    attributes: list[ast.Attribute],
    lines: list[bytes],
    found: _Changes,
) -> None:
    """Import what `import ray` and `import ray.train` have bound, and is still needed."""
    plain = [
        (node, each)
        for node in imports
        if isinstance(node, ast.Import)
        for each in node.names
        if each.asname is None
    ]
    moved = [node for node, each in plain if _is_submodule(each.name, _OLD)]
    stay = [
        node
        for node, each in plain
        if _is_submodule(each.name, "ray") and not _is_submodule(each.name, _OLD)
    ]
    replaced = {id(node.value) for node in attributes}
    uses = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "ray" and id(node) not in replaced
    ]
    if attributes and not moved and stay:
        _insert(stay[0], f"import {_NEW}", lines, found)
    if uses and moved and not stay:
        _insert(moved[0], "import ray", lines, found)


def _insert(node: ast.stmt, statement: str, lines: list[bytes], found: _Changes) -> None:
    indent = lines[node.lineno - 1][: node.col_offset].decode()
    text = f"{statement}\n{indent}" if not indent.strip() else f"{statement}; "
    found.edits.append(_Edit(node.lineno, node.col_offset, node.col_offset, text))


def _missing_names(line: int, module: str, names: Iterable[str]) -> Iterator[MigrationNote]:
    there = public_names(module)
    if there is None:
        yield MigrationNote(line, f"there is no {module}; what is public lies in drawbar.train")
        return
    for name in names:
        if name not in there and name != "*":
            yield MigrationNote(line, _missing_name_reason(name, module))


def _missing_name_reason(name: str, module: str) -> str:
    if module == _NEW:
        try:
            getattr(train, name)
        except AttributeError as error:
            if f"no {name}: " in str(error):  # the message names the replacement
                return str(error)
    return f"{module} has no {name}"


def _check_config_calls(tree: ast.AST, found: _Changes) -> None:
    """List arguments of configs that Drawbar does not take."""
    tunes = {
        each.asname or each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and _is_submodule(node.module or "", _TUNE)
        for each in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "Tuner":
            found.notes += _check_tuner_call(node, tunes)
        if name not in _CONFIGS or _is_from_tune(node.func, tunes):
            continue
        taken = inspect.signature(getattr(train, name)).parameters
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in taken:
                text = f"{name} takes no {keyword.arg}; it says at the call what to write instead"
                found.notes.append(MigrationNote(keyword.value.lineno, text))


def _check_tuner_call(call: ast.Call, tunes: set[str]) -> Iterator[MigrationNote]:
    yield MigrationNote(
        call.lineno, "Tuner takes trainer.as_trainable(), if it was given a trainer"
    )
    for each in call.keywords:
        value = each.value
        made_by_tune = isinstance(value, ast.Call) and _is_from_tune(value.func, tunes)
        if each.arg == "run_config" and not made_by_tune:
            text = "Tuner takes the RunConfig and CheckpointConfig of ray.tune, not drawbar.train"
            yield MigrationNote(value.lineno, text)


def _is_from_tune(function: ast.expr, names: set[str]) -> bool:
    """Whether a config is Ray Tune's, which has some by the same names; `names` are from there."""
    if isinstance(function, ast.Attribute):
        return ast.unparse(function.value).split(".")[-1] == "tune"
    return isinstance(function, ast.Name) and function.id in names


def _check_strings(tree: ast.AST, found: _Changes) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            told = [text for pattern, text in _IN_TEXT if pattern.search(node.value)]
            found.notes += [MigrationNote(node.lineno, text) for text in told]


def _apply_edits(lines: list[bytes], edits: list[_Edit]) -> list[str]:
    changed = list(lines)
    for edit in sorted(edits, reverse=True):  # the last first, so that places stay
        line = changed[edit.line - 1]
        changed[edit.line - 1] = line[: edit.start] + edit.text.encode() + line[edit.end :]
    return [line.decode() for line in changed]
