"""Replacement of Ray's `setup_worker.py` for the command of a fork server.

Ray starts a worker that has a runtime environment with `python setup_worker.py`. This script only
runs the command of the runtime environment, but imports Ray, which took two thirds of the time of
a start with a fork server.

Python executes the line in `drawbar_fork_server.pth` before any script. In a process of
`setup_worker.py`, the line calls `run()`. If the command is not one of a fork server, or if a later
version of Ray passes other arguments, `run()` returns, and Ray's script continues.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence

_CLIENT_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "client.py")
_CONTEXT_OPTION = "--serialized-runtime-env-context="
_LANGUAGE_OPTION = "--language="
_FIELDS = {"command_prefix", "env_vars", "java_jars", "override_worker_entrypoint", "py_executable"}


def run(arguments: Sequence[str]) -> None:
    """Run the command of a fork server in this process, if the arguments have one.

    Args:
        arguments: Arguments of `setup_worker.py`.
    """
    own = [text for text in arguments if text.startswith((_CONTEXT_OPTION, _LANGUAGE_OPTION))]
    contexts = [text for text in own if text.startswith(_CONTEXT_OPTION)]
    if len(own) != 2 or f"{_LANGUAGE_OPTION}PYTHON" not in own or len(contexts) != 1:
        return
    context = json.loads(contexts[0].removeprefix(_CONTEXT_OPTION))
    if (
        sys.platform != "linux"
        or context.keys() != _FIELDS
        or context["override_worker_entrypoint"] is not None
        or _CLIENT_FILE not in context["py_executable"]
    ):
        return
    # As in Ray's `update_envs` and `RuntimeEnvContext.exec_worker`.
    for name, value in context["env_vars"].items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    passed = [shlex.quote(argument) for argument in arguments if argument not in own]
    command = [*context["command_prefix"], "exec", context["py_executable"], *passed]
    os.execvp("bash", ["bash", "-c", " ".join(command)])
