"""Progress of a run toward its end: percent, rate, and estimated remaining time."""

from __future__ import annotations

import msgspec


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a run, as `drawbar.train.set_progress` on rank 0 has set it.

    Attributes:
        done: Completed steps, or another unit.
        total: All steps; None if unknown.
        unit: Name of the counted items, such as "steps".
        time: Time of the call, in seconds since the epoch.
        rate: Recent steps per second in the attempt; None if unknown.

    Example:
        Print the remaining time of a run:

            progress = runs.find_run("experiment").progress
            if progress is not None:
                print(progress.percent, progress.eta_seconds)
    """

    done: int | float
    total: int | float | None = None
    unit: str = "steps"
    time: float = 0.0
    rate: float | None = None

    @property
    def percent(self) -> float | None:
        """Completed part, from 0 to 100; None without a total. 100 only if all is done."""
        if self.total is None:
            return None
        return 100.0 if self.done >= self.total else min(100 * self.done / self.total, 99.99)

    @property
    def eta_seconds(self) -> float | None:
        """Estimated seconds from `time` to the end; None if unknown."""
        if self.total is None:
            return None
        if self.done >= self.total:
            return 0.0
        return (self.total - self.done) / self.rate if self.rate else None

    def to_dict(self) -> dict[str, object]:
        """Return the progress as JSON values, with percent and ETA.

        Returns:
            The attributes and properties by name.
        """
        derived = {"percent": self.percent, "eta_seconds": self.eta_seconds}
        return {**msgspec.structs.asdict(self), **derived}

    def __str__(self) -> str:
        done = _format_count(self.done)
        parts = [f"{done} {self.unit}"]
        if self.total is not None:
            parts = [
                f"{int(self.percent or 0)} %",
                f"{done}/{_format_count(self.total)} {self.unit}",
            ]
        if self.rate:
            parts.append(format_rate(self.rate, self.unit))
        if self.eta_seconds:
            parts.append(f"ETA {format_clock(self.eta_seconds)}")
        return ", ".join(parts)


def _format_count(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def format_rate(rate: float, unit: str) -> str:
    """Return a rate, such as "12.3 steps/s"."""
    return f"{rate:.1f} {unit}/s" if rate < 100 else f"{rate:,.0f} {unit}/s"


def format_clock(seconds: float) -> str:
    """Return a duration, such as "01:23" or "1:02:03"."""
    minutes, seconds = divmod(int(min(seconds, 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
