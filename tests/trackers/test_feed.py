"""Feed of reports: it continues at a position in any attempt."""

from __future__ import annotations

import contextlib
from pathlib import Path

from drawbar.train import report
from drawbar.train.runs import FeedPosition, ReportFeed, ReportRow
from tests.train.runs import fit


def report_and_fail_once(config: dict[str, str]) -> None:
    marker = Path(config["marker"])
    is_first = not marker.exists()
    marker.touch()
    for index in range(4):
        report({"loss": float(index)})
        if is_first and index == 1:
            raise RuntimeError("first attempt")


def test_feed_continues_at_position_in_later_attempt(tmp_path: Path) -> None:
    config = {"marker": str(tmp_path / "marker")}
    path = fit(report_and_fail_once, tmp_path, config, max_failures=1).path
    with contextlib.closing(ReportFeed(path, rank=0)) as feed:
        rows = [row for row in feed.read() if isinstance(row, ReportRow)]
    attempt = rows[-1].attempt
    assert attempt == 1
    position = FeedPosition(attempt, {0: 2})
    with contextlib.closing(ReportFeed(path, rank=0, position=position)) as feed:
        later = [row for row in feed.read() if isinstance(row, ReportRow)]
    assert later == [row for row in rows if row.attempt == attempt and row.index >= 2]
    assert [row.index for row in later] == [2, 3]
