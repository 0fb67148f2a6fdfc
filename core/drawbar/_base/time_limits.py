"""Checks of time limits, and the end of a scheduler's job."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from drawbar._base import fields
from drawbar._base.frames import warn_caller

JOB_END_VARIABLE = "SLURM_JOB_END_TIME"
"""Environment variable with the end of a Slurm job, in seconds since the epoch."""


def check_max_time(name: str, value: Any) -> timedelta | None:
    """Check a duration, and convert it to a timedelta."""
    if value is None:
        return None
    return timedelta(seconds=fields.parse_duration(name, value, none_meaning="is no limit"))


def check_stop_before(name: str, value: Any) -> datetime | timedelta | None:
    """Check an absolute time, or a duration, which is converted to a timedelta."""
    if not isinstance(value, datetime):
        return check_max_time(name, value)
    if value.timestamp() <= time.time():
        raise ValueError(
            f"{name}={value!s} is in the past, so the run would stop at its start. Set a later "
            "time, or None for no limit"
        )
    return value.astimezone()  # another process may have another time zone


def resolve_stop_before(value: object) -> datetime | None:
    """Return an absolute time. A duration is a time before the end of the Slurm job.

    Call it in the process of the driver, whose environment has the end of the job.

    Raises:
        ValueError: The time is in the past.
    """
    if not isinstance(value, timedelta):
        return value if isinstance(value, datetime) else None
    end = os.environ.get(JOB_END_VARIABLE, "")
    if end.isdecimal():
        time_limit = datetime.fromtimestamp(int(end), UTC) - value
        check_stop_before("RunConfig.stop_before", time_limit)
        return time_limit
    warn_caller(
        f"RunConfig(stop_before={value!r}) has no effect, because {JOB_END_VARIABLE} is not set: "
        "this process is not in a Slurm job. Set max_time=, or pass a datetime."
    )
    return None
