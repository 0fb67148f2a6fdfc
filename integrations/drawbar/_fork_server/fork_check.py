"""Check whether this machine can fork workers."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec

from drawbar._fork_server.client import ERROR_VARIABLE
from drawbar._fork_server.fork_server_spec import ForkServerSpec
from drawbar._fork_server.forkserver_preload import VARIABLE, read_default_modules
from drawbar._process.preloadable import FRAMEWORKS

_PRINT_ERROR = f"import os; print(os.environ.get({ERROR_VARIABLE!r}, ''))"


def find_fork_obstacle(modules: Iterable[str] | None = None, *, timeout_s: float = 120) -> str:
    """Fork a process as for a worker, and return what prevents it.

    It starts a fork server on this machine, which imports the modules, so it takes some seconds.
    The server ends with this process.

    Args:
        modules: Modules to import. Default: the modules of `DRAWBAR_FORKSERVER_PRELOAD`, or the
            installed packages that Drawbar preloads.
        timeout_s: Time limit in seconds.

    Returns:
        The reason why workers on this machine start without a fork, "" if they are forked.

    Example:
        >>> find_fork_obstacle(["torch"])
        ''
    """
    if modules is None:
        modules = read_default_modules()
        if modules == ():
            return f"{VARIABLE} is empty"
    if modules is None:
        modules = sorted(name for name in FRAMEWORKS if find_spec(name) is not None)
    spec = ForkServerSpec.create(tuple(modules), sys.path, {})
    # The script is a file for Ray, so the client has no option for code.
    command = f"{spec.make_command()} /dev/stdin <<< {shlex.quote(_PRINT_ERROR)}"
    try:
        process = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the check failed: {error}"
    if process.returncode != 0:
        return f"the check failed: {process.stderr.strip() or process.returncode}"
    return process.stdout.strip()
