"""Find imported modules that depend on the variables of a rank, such as RANK.

`program_server.py` imports this file by path; it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping

RANK_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
        *("DRAWBAR_PROGRAM", "DRAWBAR_SESSION"),
    }
)
"""Variables that differ between ranks or attempts. A fork server does not have them."""

# Modules whose function `rank_zero_only` has an attribute `rank`, and the variable with its value.
_RANK_ATTRIBUTES = {
    "lightning_utilities.core.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
_KNOWN_READERS = frozenset(
    {
        # `set_rank` sets what these modules have read.
        *("lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"),
        "torchmetrics.utilities.prints",
        # They read all variables, but only use those that begin with FSSPEC_ and TQDM_.
        *("fsspec.config", "tqdm.utils"),
    }
)
_ACCESS_MODULES = frozenset({"os", "collections.abc"})


@contextlib.contextmanager
def track_rank_reads() -> Iterator[set[str]]:
    """Return the modules that read a variable of the rank, or all variables, in this block."""
    variables = _TrackedVariables(os.environ._data)  # type: ignore[attr-defined]  # not public
    _replace_variables(variables)
    try:
        yield variables.readers
    finally:
        _replace_variables(dict(variables.items()))
        variables.readers -= _KNOWN_READERS


def set_rank(environment: Mapping[str, str]) -> None:
    """Set values that imported modules would have read from the variables of the rank."""
    for name, variable in _RANK_ATTRIBUTES.items():
        function = getattr(sys.modules.get(name), "rank_zero_only", None)
        if function is not None and hasattr(function, "rank"):
            function.rank = int(environment[variable])


def _replace_variables(variables: dict[bytes, bytes]) -> None:
    os.environ._data = os.environb._data = variables  # type: ignore[attr-defined]  # not public


class _TrackedVariables(dict[bytes, bytes]):
    """Variables of `os.environ` that record the modules that read them.

    Attributes:
        readers: Names of the modules that read a variable of the rank, or all variables.
    """

    def __init__(self, variables: Mapping[bytes, bytes]) -> None:
        super().__init__(variables)
        self.readers: set[str] = set()

    def __getitem__(self, name: bytes) -> bytes:
        if os.fsdecode(name) in RANK_VARIABLES:
            self.readers.add(_find_caller())
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[bytes]:
        self.readers.add(_find_caller())
        return super().__iter__()


def _find_caller() -> str:
    """Return the module that uses `os.environ`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _ACCESS_MODULES:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
