"""`Driver`: what a driver's runs find around them, for a process that starts runs in its place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drawbar.train._config.forwarded_env import select_forwarded
from drawbar.train._driver_env import DriverEnvironment


@dataclass(frozen=True, kw_only=True)
class DriverContext:
    """A driver as another process, maybe on another node, is to find it: see `here`.

    Attributes:
        environment: The variables that its workers get.
        surroundings: Arguments, folder, import path, logging and `DataContext`.
    """

    env_vars: dict[str, str]
    driver_env: DriverEnvironment

    @classmethod
    def capture(cls, forward_env: Sequence[str] = ()) -> DriverContext:
        """Give this process; `forward_env` as for `RunConfig`."""
        return cls(
            env_vars=select_forwarded(os.environ, forward_env),
            driver_env=DriverEnvironment.capture(),
        )

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Have the runs that start in this process find what they would find in that one."""
        os.environ.update(self.env_vars)
        with self.driver_env.apply():
            yield
