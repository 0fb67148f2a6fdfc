"""Worker groups whose processes cannot be replaced within an attempt or moved."""

from __future__ import annotations


class FixedProcesses:
    """Methods of a group that uses the processes that exist, on their nodes."""

    def replace_worker(self, *arguments: object, shares_node: bool) -> None:
        """Raise an error. Runs of these groups reject `FailureConfig(recovery="in_place")`."""
        raise NotImplementedError("only workers on Ray can recover in place")

    def exclude_node(self, node_id: str) -> bool:
        """Return False: the workers cannot move to another node."""
        return False
