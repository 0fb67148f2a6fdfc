"""Find imported modules that depend on the variables of a rank, such as RANK.

`program_server.py` imports this file by path; it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

RANK_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *(
            "TORCHELASTIC_MAX_RESTARTS",
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_ERROR_FILE",
            "DRAWBAR_CPUS",
        ),
        *("DRAWBAR_PROGRAM", "DRAWBAR_SESSION"),
    }
)
"""Variables that differ between ranks or attempts. A fork server does not have them."""

_KNOWN_READERS = frozenset(
    {
        # `rank_attributes.set_rank` sets what these modules have read.
        *("lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"),
        "torchmetrics.utilities.prints",
        # They search all variables for those that begin with FSSPEC_, NETWORKX_, or TQDM_.
        *("fsspec.config", "networkx.utils.backends", "tqdm.utils"),
    }
)
_ACCESS_MODULES = frozenset({"os", "collections.abc"})


@contextlib.contextmanager
def track_rank_reads() -> Iterator[set[str]]:
    """Return the modules that read a variable of the rank, or all variables, in this block."""
    variables: tuple[Any, ...] = (os.environ, os.environb)
    classes = [type(mapping) for mapping in variables]
    _TrackedVariables.readers.clear()
    for mapping in variables:
        mapping.__class__ = _TrackedVariables
    try:
        yield _TrackedVariables.readers
    finally:
        for mapping, original in zip(variables, classes, strict=True):
            mapping.__class__ = original
        _TrackedVariables.readers -= _KNOWN_READERS


class _TrackedVariables(os._Environ[Any]):
    """Class of `os.environ` and `os.environb` that records the modules that read them.

    Attributes:
        readers: Names of the modules that read a variable of the rank, or all variables.
    """

    readers: ClassVar[set[str]] = set()

    def __getitem__(self, name: Any) -> Any:
        if os.fsdecode(name) in RANK_VARIABLES:
            self.readers.add(_find_caller())
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[Any]:
        self.readers.add(_find_caller())
        return super().__iter__()


def _find_caller() -> str:
    """Return the module that uses `os.environ`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _ACCESS_MODULES:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
