"""`FailureConfig`: restart limits, hang detection, and reuse of worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, ClassVar, Literal

from drawbar._base import fields
from drawbar._base.frames import warn_caller

Limit = Annotated[int, fields.at_least(-1)]
"""A maximum number. -1 is no limit."""


def _to_timedelta(name: str, value: object, *, none_meaning: str) -> timedelta:
    return timedelta(seconds=fields.parse_duration(name, value, none_meaning=none_meaning))


@dataclass(frozen=True, repr=False)
class FailureConfig(fields.ConfigRepr):
    """Failure handling: restart limits, hang detection, and reuse of worker processes.

    Configuration errors are never retried.

    Args:
        max_failures: Maximum number of restarts from the latest committed checkpoint after a worker
            failed. 0 disables restarts; -1 sets no limit.
        max_preemption_failures: Maximum number of restarts after workers were lost with their
            nodes, counted separately. -1 sets no limit.
        max_startup_failures: Maximum number of failed starts of the worker group that are retried.
            -1 sets no limit. The delay between starts doubles from 2 s to 60 s.
        max_rollbacks: Maximum number of restarts that the training function requests with
            `train.rollback()`, counted separately. 0 ends the run with the first one; -1 sets no
            limit.
        reuse_workers: Whether a restart keeps the processes of workers that did not fail, with
            their imported modules and `get_context().cache`. This requires a backend that supports
            it, and a training function that stops within one second when another rank fails.
        recovery: "restart" ends the attempt of all ranks when one of them fails, and starts the
            next one from the latest checkpoint. "in_place" replaces a rank whose process dies,
            while the others wait in their training function. See the page on fault tolerance.
        hang_timeout: Time in seconds, or a timedelta. The attempt fails if no rank shows any
            activity (reports, collectives, output) for this long, even if some ranks have returned.
            Drawbar then writes the stacks of all ranks to `<run>/stacks` and raises a `HangError`,
            which shows the location of each rank and marks the smallest group. Counts as one of
            `max_failures`. None disables the timeout.
        stall_warning_after: Time in seconds, or a timedelta. The console warns if a rank shows no
            activity for this long, and others wait for it, have returned, or have made at least two
            more reports. It shows the rank, its location, and how to inspect it.
            `RunHandle.stalled_ranks` then contains the rank. The run continues. None disables the
            warning.
        stop_when_deterministic: Whether the run ends, although restarts are left, if a restart
            cannot help: the same failure has happened twice at the same line and the same data, in
            two processes, or the disk of a node is full. See the guide's page on failures.
        exclude_nodes_after: Number of failures in a row on one node, while the other nodes were
            healthy, after which the run leaves the node. It stays if the other nodes have no room.
            None keeps the run on all nodes.
        controller_failure_limit: Ray Train's name for `max_startup_failures`.
        relax_collectives_on_preemption: Accepted for compatibility with Ray Train and ignored with
            a warning.
        preemption_grace_s: Accepted for compatibility with Ray Train and ignored with a warning.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A limit is below -1, a duration is not positive and finite, or recovery is
            "in_place" and max_failures is 0 or stall_warning_after is None.

    Example:
        >>> FailureConfig(max_failures=3, hang_timeout=1800)
        FailureConfig(max_failures=3, hang_timeout=datetime.timedelta(seconds=1800))
    """

    _replacements: ClassVar[Mapping[str, str]] = {
        "fail_fast": "max_failures=0, the default, ends the run with its first failure"
    }

    max_failures: Limit = 0
    _: KW_ONLY
    # No limit: a preempted node is no sign of a fault in the function, which restarts elsewhere.
    max_preemption_failures: Limit = -1
    # A node may be lost during startup. A permanent error fails three times.
    max_startup_failures: Limit = 2
    max_rollbacks: Limit = 3
    reuse_workers: bool = True
    recovery: Literal["restart", "in_place"] = "restart"
    # None by default: a long epoch looks like a hang, and only the user knows how long one may be.
    hang_timeout: Annotated[
        float | timedelta | None, partial(_to_timedelta, none_meaning="waits without limit")
    ] = None
    stall_warning_after: Annotated[
        float | timedelta | None, partial(_to_timedelta, none_meaning="disables the warning")
    ] = timedelta(seconds=30)
    stop_when_deterministic: bool = True
    exclude_nodes_after: Annotated[int | None, fields.at_least(1)] = 2
    controller_failure_limit: InitVar[int | None] = None
    relax_collectives_on_preemption: InitVar[bool] = False
    preemption_grace_s: InitVar[float] = 0.0

    def __post_init__(
        self,
        controller_failure_limit: int | None,
        relax_collectives_on_preemption: bool,
        preemption_grace_s: float,
    ) -> None:
        if controller_failure_limit is not None:
            object.__setattr__(self, "max_startup_failures", controller_failure_limit)
        if relax_collectives_on_preemption or preemption_grace_s:
            warn_caller(
                "FailureConfig(relax_collectives_on_preemption=, preemption_grace_s=) have no "
                "effect: ranks on preempted nodes run until their nodes stop or a checkpoint is "
                "committed, and the run then continues on other nodes"
            )
        super().__post_init__()
        if self.recovery == "in_place" and self.stall_warning_after is None:
            raise ValueError(
                "FailureConfig(recovery='in_place') needs stall_warning_after, but it is None. If "
                "ranks wait for a new process that has lost count of its steps, the run restarts "
                "after this time. Set stall_warning_after=30, the default."
            )
        if self.recovery == "in_place" and self.max_failures == 0:
            raise ValueError(
                "FailureConfig(recovery='in_place') needs max_failures, which counts the deaths "
                "that are recovered, but it is 0. Set max_failures=10, or -1 for no limit."
            )


def enable_in_place_recovery(config: FailureConfig, requested_by: str) -> FailureConfig:
    """Return a config with recovery in place, which another setting requests.

    Without restarts, nothing can be recovered. The config then stays as it is, with a warning.

    Args:
        config: Config of the user.
        requested_by: Name of the other setting, such as "TorchftConfig".

    Raises:
        ValueError: Another value of the config does not allow it.
    """
    if config.max_failures == 0:
        warn_caller(
            f"{requested_by} has no effect: with FailureConfig(max_failures=0), the default, the "
            "run ends with its first failure. Set max_failures=10, or -1 for no limit"
        )
        return config
    try:
        return dataclasses.replace(config, recovery="in_place")
    except ValueError as error:
        raise ValueError(f"{requested_by} requests recovery in place. {error}") from None
