"""NodeWatcher with an unresponsive GCS, without Ray."""

from __future__ import annotations

import asyncio
import threading

import pytest

from drawbar.train._controller import node_watcher
from drawbar.train._controller.node_watcher import NodeWatcher
from drawbar.train._history.live_events import Event, Notice


def test_node_watcher_reports_unresponsive_and_recovered_gcs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_watcher, "DRAIN_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(node_watcher, "GCS_NOTICE_S", 0.05)
    is_responding, notices = threading.Event(), list[str]()

    def get_draining_nodes() -> dict[str, int]:
        assert is_responding.wait(300)
        return {}

    async def watch() -> None:
        has_both_notices = asyncio.Event()

        def emit(event: Event) -> None:
            assert isinstance(event, Notice)
            notices.append(event.text)
            is_responding.set()
            if len(notices) == 2:
                has_both_notices.set()

        task = asyncio.create_task(NodeWatcher(get_draining_nodes, lambda _: None, emit).run())
        await asyncio.wait_for(has_both_notices.wait(), 60)
        task.cancel()

    asyncio.run(watch())
    assert notices[0].startswith("Ray's control service (GCS) does not respond.")
    assert notices[1] == "Ray's control service (GCS) responds again."
