"""Named points at which a failure test can stop a process.

The points, in the order in which a report and a checkpoint pass them:

    reports.written       controller: a batch of reports is written, no watcher has received it

    persist.start         worker: before it copies its files into the staging area
    persist.half          worker: some of its files are copied
    commit.start          controller: the files of all ranks are staged
    commit.merged         controller: the files are in one directory, without a manifest
    commit.manifest       controller: the manifest is written, the directory is not yet renamed
    commit.renamed        controller: the checkpoint is committed, the ranks are not notified
    commit.journaled      controller: the commit is journaled, the ranks are not notified
    reports.compressed    controller: a compressed segment exists in addition to the open one

`drawbar.train.testing.kill_at` arms them. `maybe_stop_at` does nothing outside of tests.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = (
    "reports.written",
    "persist.start",
    "persist.half",
    "commit.start",
    "commit.merged",
    "commit.manifest",
    "commit.renamed",
    "commit.journaled",
    "reports.compressed",
)

armed_actions: dict[str, Callable[[], None]] = {}


def maybe_stop_at(point: str) -> None:
    """Run the action that a test armed for this point, if any."""
    if armed_actions and point in armed_actions:
        armed_actions[point]()
