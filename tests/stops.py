"""Stop a run from its training function, at a known step."""

from __future__ import annotations

import threading

from drawbar import train
from drawbar.train._worker.active_session import current_session


def stop_run() -> None:
    """Request the end of this run, and wait until this rank has received the request."""
    train.attach(train.get_context().get_storage()).stop()
    requests = current_session("stop_run").requests
    while not requests.get_commands():
        threading.Event().wait(0.001)
