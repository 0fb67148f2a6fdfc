"""Assemble the default watchers of a run from the features beside the kernel."""

from __future__ import annotations

from functools import partial

from drawbar._console.console import Console
from drawbar._observe.metrics_publisher import MetricsPublisher
from drawbar._observe.resource_log import ResourceLog
from drawbar.train._config.run_config import RunConfig
from drawbar.train._controller.run import MakeWatcher


def make_watchers(
    run_config: RunConfig, *, is_live: bool = True, is_on_ray: bool = False
) -> list[MakeWatcher]:
    """Return functions that create the watchers of a run in this process.

    Args:
        run_config: Settings of the run.
        is_live: Whether the console may have a live display; see `Console`.
        is_on_ray: Whether this process is connected to Ray.
    """
    level = run_config.logging_config.level_number
    return [
        lambda run, emit: Console(level, run.directory.uri, is_live=is_live),
        *make_observers(is_on_ray=is_on_ray),
    ]


def make_observers(*, is_on_ray: bool) -> list[MakeWatcher]:
    """Return functions that create the watchers of a run whose console is in another process."""
    return [
        lambda run, emit: ResourceLog(run.directory),
        partial(MetricsPublisher, is_on_ray=is_on_ray),
    ]
