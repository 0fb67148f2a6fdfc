"""`DriverContext`: a driver's variables and environment, for a process that starts its runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drawbar.train._config.forwarded_env import select_forwarded
from drawbar.train._driver_env import DriverEnvironment


@dataclass(frozen=True, kw_only=True)
class DriverContext:
    """Variables and environment of a driver, for another process that starts runs in its place.

    Attributes:
        env_vars: Environment variables that workers receive.
        driver_env: Arguments, working directory, import path, logging, and `DataContext`.

    Example:
        context = DriverContext.capture()

        @ray.remote
        def run_trial():
            with context.apply():
                trainer.fit()
    """

    env_vars: dict[str, str]
    driver_env: DriverEnvironment

    @classmethod
    def capture(cls, forward_env: Sequence[str] = ()) -> DriverContext:
        """Capture the context of this process.

        Args:
            forward_env: Names or patterns of additional variables, as for `RunConfig`.

        Returns:
            The context, which can be pickled.
        """
        return cls(
            env_vars=select_forwarded(os.environ, forward_env),
            driver_env=DriverEnvironment.capture(),
        )

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Recreate the captured context for runs that are started in this process.

        The environment variables stay set on exit.
        """
        os.environ.update(self.env_vars)
        with self.driver_env.apply():
            yield
