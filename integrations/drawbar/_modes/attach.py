"""`attach()`: find a run in this or another process, or one that has ended."""

from __future__ import annotations

import os

from drawbar._handle.run_handle import RunHandle
from drawbar._handle.run_view import EndedRun, RunView
from drawbar._history.run_history import RunHistory
from drawbar._history.run_locations import RunLocation, locate_run
from drawbar._modes.control_socket import SameHostRun
from drawbar._ray_connection.connection import try_connect_to_ray
from drawbar._storage.filesystem import AnyFileSystem
from drawbar._storage.journal_file import is_locked
from drawbar._storage.run_directory import RunDirectory, make_run_directory


def attach(
    path_or_name: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> RunHandle:
    """Return a handle to a running or finished run.

    A detached run can be reached from the whole cluster. Any other run can be reached from
    processes of the same user on the driver's machine. Output that a detached run writes from now
    on is shown in this process too.

    Args:
        path_or_name: Run directory, URI, or name. A name refers to a detached run in progress, or
            to a run in the default storage path.
        storage_filesystem: Filesystem of the path, as in `RunConfig`.

    Returns:
        A handle to the run.

    Raises:
        ValueError: The path or name is empty.
        LookupError: The run does not exist or was interrupted. The message has the details and
            lists the detached runs of the Ray cluster, if there is one.
        TimeoutError: The process that controls the run does not reply. The message has its address.

    Example:
        ```python
        run = drawbar.train.attach("my-run")
        print(run.status)
        ```
    """
    target = os.fspath(path_or_name)
    if not target:
        raise ValueError("attach() needs the name, directory, or URI of a run, found ''")
    is_name = "/" not in target and storage_filesystem is None
    directory = make_run_directory(locate_run(target, storage_filesystem).path)
    return RunHandle(_find_run(directory, is_name=is_name))


def _find_run(directory: RunDirectory, *, is_name: bool) -> RunView:
    """Return the view of a run.

    Args:
        directory: Run directory.
        is_name: Whether the user passed only a name, so that a detached run of this name comes
            first.
    """
    ended = None if is_name else EndedRun.find(directory)
    if ended is not None and ended.is_complete:
        return ended
    # Before Ray is tried: connecting takes a second, and a run on this host does not need it.
    same_host = SameHostRun.find(directory)
    if same_host is not None and not same_host.get_state().is_detached:
        return same_host
    if same_host is None and not is_name and not _can_be_detached(directory):
        raise LookupError(_describe_directory(directory))
    # Here, because it imports Ray, which takes a second.
    from drawbar._modes.host_actor_run import attach_to_host_actor, list_detached_runs

    connect_error = try_connect_to_ray()
    uri = None if is_name else directory.uri
    hosted = attach_to_host_actor(directory.name, uri) if not connect_error else None
    run = hosted or same_host or EndedRun.find(directory)
    if run is not None:
        return run
    detached = (
        f"unknown, since {connect_error}"
        if connect_error
        else ", ".join(list_detached_runs()) or "none"
    )
    raise LookupError(f"{_describe_directory(directory)}; detached runs in progress: {detached}")


def _can_be_detached(directory: RunDirectory) -> bool:
    """Return whether the run may be in progress in a Ray actor, judging by its directory."""
    try:
        history = RunHistory.read(directory)
    except FileNotFoundError:
        return True  # the directory may be on another machine
    return not history.events or history.state.is_detached


def _describe_directory(directory: RunDirectory) -> str:
    name, uri = directory.name, directory.uri
    if directory.run_files.read_journal() is None:
        similar = ", ".join(RunLocation(directory.root.parent, name).find_similar_names())
        hint = f" (similar names: {similar})" if similar else ""
        return f"no detached run {name!r} is in progress, and {uri} contains no ended run{hint}"
    if is_locked(directory.journal_path) and _can_be_detached(directory):
        return (
            f"run {name!r} in {uri} is in progress, detached, on a cluster that this process is "
            "not connected to. Set RAY_ADDRESS or call ray.init(address=...)"
        )
    if is_locked(directory.journal_path):
        return (
            f"run {name!r} in {uri} is in progress in a driver of another user or machine, or with "
            "another TMPDIR. It is not detached, so attach from there"
        )
    if directory.remote_path is not None:
        return (
            f"run {name!r} in {uri} has not ended according to its journal, and no process of this "
            "machine hosts it: it is in progress elsewhere or was interrupted. If it was "
            'interrupted, fit() with resume="auto" resumes from its latest checkpoint'
        )
    return (
        f"run {name!r} in {uri} has not ended, and its host process died. "
        'To resume from its latest checkpoint, call fit() with resume="auto"'
    )
