"""Goodput: which part of the time of a run was productive, computed from its events.

The definition follows Google's ML goodput measurement
(https://github.com/AI-Hypercomputer/ml-goodput-measurement): work counts as productive only if it
survives, because a checkpoint contains it or the run did not have to repeat it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drawbar._base.api import set_public_module

CRASH_GAP = "crash_gap"
"""Part outside `hosted`: after a crash or a failure, no process hosted the run."""

UNREPORTED = "unreported"
"""Part of a run without reports, checkpoints, and steps, whose goodput is therefore unknown."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Productive share of the time of a run. `str(goodput)` is a table.

    Attributes:
        parts: Seconds by part, without parts of 0 s. Their sum is `elapsed`. The parts are
            "productive", "warmup", "data_wait", "checkpoint_blocked", "stalled", "recovery",
            "placement", "startup", "restart", "lost_work", "unsaved", "detection", "teardown",
            "other", "unreported", "crash_gap", and "phase:NAME" for each `drawbar.train.phase`. The
            page "Runs" of the documentation defines them.
        paused: Seconds between a stop by the user and the next start, which are in no part.
        worker_seconds: Sum over the workers of the seconds in which their processes were running.
        requested_worker_seconds: `hosted` times the number of requested workers, which is the
            maximum of an elastic run. The difference to `worker_seconds` is the time without the
            requested workers.

    Example:
        Print how much time failures have cost:

            goodput = result.goodput
            print(goodput)
            print(goodput.parts.get("lost_work", 0.0) + goodput.parts.get("restart", 0.0))
    """

    parts: Mapping[str, float] = field(default_factory=dict)
    paused: float = 0.0
    worker_seconds: float = 0.0
    requested_worker_seconds: float = 0.0

    @property
    def productive(self) -> float:
        """Seconds of training whose results the run still has."""
        return self.parts.get("productive", 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds from the first start to the end, without `paused`."""
        return sum(self.parts.values())

    @property
    def hosted(self) -> float:
        """Seconds in which a process hosted the run."""
        return self.elapsed - self.parts.get(CRASH_GAP, 0.0)

    @property
    def goodput(self) -> float | None:
        """`productive` divided by `hosted`; None if it is unknown.

        It is unknown before the start, and as long as the run has reported nothing.
        """
        if self.hosted <= 0 or UNREPORTED in self.parts:
            return None
        return self.productive / self.hosted

    @property
    def effective(self) -> float | None:
        """`productive` divided by `elapsed`; None if it is unknown, as for `goodput`."""
        return None if self.goodput is None else self.productive / self.elapsed

    @property
    def shares(self) -> Mapping[str, float]:
        """Each part divided by `hosted`, without "crash_gap". The sum is 1.

        The share of "productive" is the goodput.
        """
        hosted = self.hosted
        return {
            part: seconds / hosted
            for part, seconds in self.parts.items()
            if part != CRASH_GAP and hosted > 0
        }

    def to_dict(self) -> dict[str, object]:
        """Return all values as JSON values.

        Returns:
            Ratios from 0 to 1, or None if they are unknown, and seconds.

        Example:
            >>> json.dumps(result.goodput.to_dict())
        """
        return {
            "goodput": self.goodput,
            "effective": self.effective,
            "productive": self.productive,
            "hosted": self.hosted,
            "elapsed": self.elapsed,
            "paused": self.paused,
            "worker_seconds": self.worker_seconds,
            "requested_worker_seconds": self.requested_worker_seconds,
            "parts": dict(self.parts),
        }

    def __str__(self) -> str:
        ratio = "unknown" if self.goodput is None else f"{self.goodput:.1%} of {self.hosted:.1f} s"
        lines = [f"goodput {ratio}"]
        for part, seconds in sorted(self.parts.items(), key=lambda item: -item[1]):
            name = part.replace("phase:", "phase ").replace("_", " ")
            share = f"{self.shares[part]:.1%}" if part in self.shares else "-"
            lines.append(f"  {name:<20} {seconds:>10.1f} s {share:>6}")
        return "\n".join(lines)


set_public_module(globals(), module="drawbar.train", names=["Goodput"])
