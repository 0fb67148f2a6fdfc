"""Named points that a failure test can stop a process at. In a normal run `reached` does nothing.

The points, in the order in which one checkpoint passes them:

    persist.start         worker: about to copy its files into the staging area
    persist.half          worker: one part of the files is copied, the rest is not
    commit.start          controller: every rank's files are staged
    commit.merged         controller: the files lie in one directory, without a manifest
    commit.manifest       controller: the manifest is written, the directory is not yet in place
    commit.renamed        controller: the checkpoint is committed, no rank knows it
    commit.journaled      controller: the journal has it, no rank knows it

`drawbar.train.testing.kill_at` arms them.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS = (
    "persist.start",
    "persist.half",
    "commit.start",
    "commit.merged",
    "commit.manifest",
    "commit.renamed",
    "commit.journaled",
)

armed_actions: dict[str, Callable[[], None]] = {}


def maybe_stop_at(point: str) -> None:
    """Run what a test armed for this point, if anything."""
    if armed_actions and point in armed_actions:
        armed_actions[point]()
