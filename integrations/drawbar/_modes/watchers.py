"""Assemble the default watchers of a run: the console, metrics, and a recorder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from drawbar._async_save.memory_copies import make_run_key
from drawbar._async_save.memory_restore import CopyReleaser, resume_from_memory
from drawbar._console.console import Console
from drawbar._observe.metrics_publisher import MetricsPublisher
from drawbar._observe.observation_recorder import ObservationRecorder
from drawbar._observe.resource_sampler import sample_resources
from drawbar.train._config.run_config import RunConfig
from drawbar.train._controller.run import MakeWatcher
from drawbar.train._protocol.assignment import Sampler

SAMPLERS: tuple[Sampler, ...] = (sample_resources, resume_from_memory)
"""Observe each rank while its training function runs."""


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
        *_make_observers(is_on_ray=is_on_ray),
    ]


def make_remote_watchers(
    run_config: RunConfig,
) -> tuple[list[MakeWatcher], Callable[[str], Console]]:
    """Return functions for a run in an actor: for its watchers there, and for consoles of clients.

    Args:
        run_config: Settings of the run.
    """
    make_console = partial(Console, run_config.logging_config.level_number)
    return _make_observers(is_on_ray=True), make_console


def _make_observers(*, is_on_ray: bool) -> list[MakeWatcher]:
    return [
        partial(MetricsPublisher, is_on_ray=is_on_ray),
        lambda run, emit: CopyReleaser(make_run_key(run.run_id, run.directory)),
        # Last: it emits events about others, which the watchers before it receive in order.
        lambda run, emit: ObservationRecorder(run.directory, emit),
    ]
