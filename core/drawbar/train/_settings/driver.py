"""`Driver`: what a driver's runs find around them, for a process that starts runs in its place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drawbar.train._settings.forwarded import forwarded
from drawbar.train._surroundings import Surroundings


@dataclass(frozen=True, kw_only=True)
class Driver:
    """A driver as another process, maybe on another node, is to find it: see `here`.

    Attributes:
        environment: The variables that its workers get.
        surroundings: Arguments, folder, import path, logging and `DataContext`.
    """

    environment: dict[str, str]
    surroundings: Surroundings

    @classmethod
    def here(cls, forward_env: Sequence[str] = ()) -> Driver:
        """Give this process; `forward_env` as for `RunConfig`."""
        return cls(environment=forwarded(os.environ, forward_env), surroundings=Surroundings.here())

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have the runs that start in this process find what they would find in that one."""
        os.environ.update(self.environment)
        with self.surroundings.entered():
            yield
