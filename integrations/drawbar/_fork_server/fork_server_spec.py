"""Modules and environment of a fork server, and the command that Ray starts for its workers."""

from __future__ import annotations

import base64
import json
import os
import shlex
import sys
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from drawbar._base import ray_compat as _ray_compat
from drawbar._base.secrets import REDACTED, redact_settings
from drawbar._base.train_function import FunctionIdentity
from drawbar._fork_server import client
from drawbar._fork_server.forkable import read_node_id, read_start_time
from drawbar._process.imported_modules import ModulesImported

# A node may lack the driver's interpreter or Drawbar's directory. Then Python is found by PATH, as
# Ray does it for conda environments.
_SHELL = 'if [ -x "$0" ] && [ -f "$1" ]; then exec "$0" -I -S "$@"; fi; shift 2; exec python3 "$@"'


LearningKey = tuple[FunctionIdentity, tuple[str, ...]]
"""Training function and import path of the driver."""

_learned: dict[LearningKey, ModulesImported] = {}
"""Modules that the training functions of this process have imported in their workers."""


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable must not be part of a command line."""
    is_switch = value.isdecimal() or value.lower() in (
        "",
        "true",
        "false",
        "yes",
        "no",
        "on",
        "off",
    )
    return not is_switch and REDACTED in redact_settings({name: value})[name]


def is_fork_command(py_executable: object) -> bool:
    """Return whether the interpreter of a runtime environment is the command of a fork server."""
    return isinstance(py_executable, str) and client.__file__ in py_executable


def _remove_ray_folder(sys_path: Iterable[str]) -> tuple[str, ...]:
    """Remove a folder that Ray adds to the import path of each process that imports it."""
    return tuple(path for path in sys_path if os.path.basename(path) != "thirdparty_files")


@dataclass(frozen=True)
class ForkServerSpec:
    """Modules of the fork servers of a run, and the import path and environment for them.

    Attributes:
        modules: Names of the modules to import.
        sys_path: Import path of the driver, or of an earlier worker.
        environment: Variables of the driver that the modules may read when they are imported.
        key: Key of the modules that the workers import. None if the user has set the modules.
        learned: Message of an earlier worker that has the modules; None if they are of the user or
            of the backend.
    """

    modules: tuple[str, ...]
    sys_path: tuple[str, ...]
    environment: Mapping[str, str]
    key: LearningKey | None = None
    learned: ModulesImported | None = None

    @classmethod
    def create(
        cls, modules: Sequence[str], sys_path: Sequence[str], environment: Mapping[str, str]
    ) -> ForkServerSpec:
        """Create a spec.

        Secrets in the environment are left out, because a command line is public, and the variables
        of Ray, because workers have their own.
        """
        return cls(
            tuple(modules),
            _remove_ray_folder(map(os.path.abspath, sys_path)),
            {
                name: value
                for name, value in environment.items()
                if not is_secret(name, value)
                and name not in client.VOLATILE_NAMES
                and not name.startswith("RAY_")
            },
        )

    def follow(self, function: FunctionIdentity) -> ForkServerSpec:
        """Return a spec with the modules that a function has imported in earlier workers."""
        key = function, self.sys_path
        spec = replace(self, key=key)
        return spec.learn(_learned[key]) if key in _learned else spec

    def learn(self, modules: ModulesImported) -> ForkServerSpec:
        """Return a spec with the modules that a worker has imported, and keep them for later."""
        assert self.key is not None
        _learned[self.key] = modules
        sys_path = _remove_ray_folder(modules.sys_path)
        return replace(self, modules=modules.names, sys_path=sys_path, learned=modules)

    def make_command(self) -> str:
        """Return the shell command to which Ray appends the worker's arguments, for one worker."""
        spec = {
            "command": uuid.uuid4().hex,
            "modules": self.modules,
            "worker_modules": [*_ray_compat.WORKER_MODULES, "drawbar.train._worker.actor"],
            "sys_path": self.sys_path,
            "environment": self.environment,
            "owner": [read_node_id(), os.getpid(), read_start_time(os.getpid())],
        }
        encoded = base64.urlsafe_b64encode(zlib.compress(json.dumps(spec).encode())).decode()
        return shlex.join(["sh", "-c", _SHELL, sys.executable, client.__file__, encoded])
