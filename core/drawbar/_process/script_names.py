"""Make functions and classes of the driver's script available in a worker's `__main__`.

cloudpickle recreates them in the worker, where another program is `__main__`. `multiprocessing`
pickles them by name, such as `__main__.Batch`: the worker and its child processes must find them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing import util
from pathlib import Path

from drawbar._process.serialization import serialize_without_references
from drawbar._process.spawned_main import NAMES_FILE_VARIABLE

_FILE_NAME = "script_names.pkl"


@contextlib.contextmanager
def use_script_names(names: Mapping[str, object]) -> Iterator[None]:
    """Add names to `__main__`, also in the child processes that `multiprocessing` starts."""
    if not names:
        yield
        return
    module = vars(sys.modules["__main__"])
    added = {**names, "__spec__": _ScriptSpec(names)}
    replaced = {name: module[name] for name in added if name in module}
    module.update(added)
    try:
        yield
    finally:
        for name in added:
            module.pop(name, None)
        module.update(replaced)


class _ScriptSpec:
    """Spec of `__main__` for `multiprocessing`, which imports it in processes that it spawns."""

    def __init__(self, names: Mapping[str, object]) -> None:
        self._names = names

    @property
    def name(self) -> str | None:
        """Name of the module, read before a process is spawned. Forked processes need none."""
        try:
            pickled = serialize_without_references(dict(self._names))
        except Exception as error:
            warnings.warn(
                "Processes that multiprocessing spawns cannot use functions and classes of the "
                f"script, which cannot be pickled: {error}",
                stacklevel=2,
            )
            return None
        path = Path(util.get_temp_dir(), _FILE_NAME)
        partial_path = path.with_suffix(".partial")
        partial_path.write_bytes(pickled)
        partial_path.replace(path)  # another process may be reading the file
        os.environ[NAMES_FILE_VARIABLE] = str(path)
        return "drawbar._process.spawned_main"
