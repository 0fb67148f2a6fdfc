"""Worker groups without in-place recovery."""

from __future__ import annotations


class NoReplacement:
    """Method of a group whose workers cannot be replaced within an attempt."""

    def replace_worker(self, *arguments: object, is_node_lost: bool) -> None:
        """Raise an error. Runs of these groups reject `FailureConfig(recovery="in_place")`."""
        raise NotImplementedError
