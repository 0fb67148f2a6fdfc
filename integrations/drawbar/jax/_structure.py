"""Compare the structure of a saved state with the one to load.

Orbax itself accepts some differences without an error: it loads a NumPy array of another shape, a
saved None, or the raw data of a PRNG key. It also writes leaves with the same name to one place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Structure = dict[str, list[Any]]
"""Leaves of a tree: their dtype and shape by Orbax's name, such as `params.kernel`."""

_STRUCTURE_FILE = "structure.json"
_NONE, _EMPTY = "None", "an empty container"
_MAX_LISTED = 5
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def find_structure(tree: object) -> Structure:
    """Return the structure of a tree.

    Raises:
        ValueError: Two leaves have the same name, such as `"a.b"` and `{"a": {"b": ...}}`.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_no_children)[0]
    structure: Structure = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in structure:
            raise ValueError(
                f"Two leaves of the state have the name {name!r} in the checkpoint, so one would "
                f"replace the other. Rename the key {jax.tree_util.keystr(path)}, for example "
                'without ".".'
            )
        structure[name] = _describe_leaf(leaf)
    return structure


def write_structure(directory: Path, structure: Structure) -> None:
    """Write a structure to a checkpoint directory."""
    (directory / _STRUCTURE_FILE).write_text(json.dumps(structure))


def check_structure(directory: Path, expected: Structure) -> None:
    """Check that the state in a checkpoint directory has the expected structure.

    Checkpoints without a structure were saved by older versions, and only Orbax checks them.

    Raises:
        ValueError: Leaves are missing or additional, or have another shape or kind of values.
    """
    file = directory / _STRUCTURE_FILE
    if not file.exists():
        return
    saved: Structure = json.loads(file.read_text())
    differences = [
        f"{name!r} was {_format_saved(saved.get(name))}, but `like` {_format_like(like)}"
        for name in {**saved, **expected}
        if not _is_loadable(saved.get(name), like := expected.get(name))
    ]
    if differences:
        num_unlisted = len(differences) - _MAX_LISTED
        raise ValueError(
            "load_state(like) needs the structure of the saved state. "
            + "; ".join(differences[:_MAX_LISTED])
            + (f"; and {num_unlisted} others" if num_unlisted > 0 else "")
            + ". Pass a state like the saved one, and change it after loading."
        )


def _has_no_children(node: object) -> bool:
    children = jax.tree.leaves(node, is_leaf=lambda child: child is not node)
    return not children or children[0] is node


def _describe_leaf(leaf: Any) -> list[Any]:
    if leaf is None:
        return [_NONE, []]
    if not jax.tree.leaves(leaf):
        return [_EMPTY, []]
    described = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return [str(described.dtype), list(described.shape)]


def _is_loadable(saved: list[Any] | None, like: list[Any] | None) -> bool:
    """Return whether a saved leaf can be loaded without loss of more than precision."""
    if saved == like:
        return True
    if saved is None or like is None or saved[1] != like[1]:
        return False
    if not (_is_numeric(saved[0]) and _is_numeric(like[0])):
        return False  # None, empty containers, and PRNG keys of another type
    return _find_kind(saved[0]) <= _find_kind(like[0])


def _is_numeric(dtype: str) -> bool:
    return dtype not in (_NONE, _EMPTY) and not dtype.startswith("key<")


def _find_kind(dtype: str) -> int:
    """Return the position of a dtype's kind. A kind can hold the values of the previous ones."""
    kinds = [jnp.issubdtype(jnp.dtype(dtype), kind) for kind in _KINDS]
    return kinds.index(True) if True in kinds else len(kinds)


def _format_saved(leaf: list[Any] | None) -> str:
    return "not saved" if leaf is None else f"saved as {_format_leaf(leaf)}"


def _format_like(leaf: list[Any] | None) -> str:
    return "does not have it" if leaf is None else f"has {_format_leaf(leaf)}"


def _format_leaf(leaf: list[Any]) -> str:
    dtype, shape = leaf
    return dtype if dtype in (_NONE, _EMPTY) else f"{dtype}{shape}"
