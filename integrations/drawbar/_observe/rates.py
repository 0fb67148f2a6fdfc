"""Rates of counters."""

from __future__ import annotations

from collections import deque

_WINDOW_POINTS = 31
_POINT_INTERVAL_S = 1.0


class RateWindow:
    """Rate of a counter over its latest updates: 30 s, or 30 updates if they are slower."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=_WINDOW_POINTS)

    def add(self, time: float, count: float) -> None:
        """Add the value of the counter at a time in seconds."""
        points = self._points
        if points and (count < points[-1][1] or time < points[-1][0]):
            points.clear()  # the counter or the clock was reset
        if len(points) > 1 and time - points[-2][0] < _POINT_INTERVAL_S:
            points[-1] = (time, count)
        else:
            points.append((time, count))

    def get_rate(self) -> float | None:
        """Return the change per second; None if it is unknown or zero."""
        if len(self._points) < 2:
            return None
        (first_time, first), (last_time, last) = self._points[0], self._points[-1]
        seconds = last_time - first_time
        return (last - first) / seconds if seconds > 0 and last > first else None
