"""What is said when Ray itself gives no answer, without a Ray."""

from __future__ import annotations

import asyncio
import threading

import pytest

from drawbar.train._controller import stall_detector
from drawbar.train._controller.stall_detector import NodeWatcher
from drawbar.train._history.events import Event, Notice


def test_that_rays_control_service_does_not_answer_is_said_and_that_it_does_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stall_detector, "DRAIN_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(stall_detector, "GCS_NOTICE_S", 0.05)
    answers, said = threading.Event(), list[str]()

    def draining() -> dict[str, int]:
        assert answers.wait(60)
        return {}

    async def watch() -> None:
        over = asyncio.Event()

        def emit(event: Event) -> None:
            assert isinstance(event, Notice)
            said.append(event.text)
            answers.set()
            if len(said) == 2:
                over.set()

        task = asyncio.create_task(NodeWatcher(draining, lambda: None, emit).run())
        await asyncio.wait_for(over.wait(), 60)
        task.cancel()

    asyncio.run(watch())
    assert said[0].startswith("Ray's control service (GCS) does not respond.")
    assert said[1] == "Ray's control service (GCS) responds again."
