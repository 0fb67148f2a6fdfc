"""Public functions of `drawbar.ui`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drawbar.ui._catalog import RunIndex
from drawbar.ui._export import render_page
from drawbar.ui._output_file import check_output, write_output
from drawbar.ui._server import UiServer, start_in_thread
from drawbar.ui._summary import summarize_run

DEFAULT_PORT = 8330


class RunningServer:
    """A server of run pages. Created by `start_server`; usable in a `with` statement.

    Example:
        Print the URL of the pages:

            with ui.start_server(["/shared/runs"], port=0) as server:
                print(server.url)
    """

    def __init__(self, _server: UiServer) -> None:
        self._server = _server
        self._thread = start_in_thread(_server)

    @property
    def url(self) -> str:
        """URL of the list of runs. For other hosts than this one, it contains a token."""
        return self._server.url

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the server is closed.

        Args:
            timeout: Time in seconds after which to return. Default: no limit.

        Example:
            Serve pages until Ctrl-C:

                with ui.start_server(["/shared/runs"]) as server:
                    server.wait()
        """
        self._thread.join(timeout)

    def close(self) -> None:
        """End the server. Has no effect on a closed server.

        Example:
            Serve pages during training:

                server = ui.start_server(["/shared/runs"])
                trainer.fit()
                server.close()
        """
        if self._thread.is_alive():
            self._server.close()
            self._thread.join()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start_server(
    paths: Sequence[str | os.PathLike[str]] = (),
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
) -> RunningServer:
    """Serve web pages of runs from a thread of this process.

    Args:
        paths: Storage paths, run directories, URIs, or names of runs in the default storage path.
            Default: the default storage path.
        host: Address on which to listen. If other machines can reach it, all requests need the
            token in the URL.
        port: Port; 0 for any free one. If it is in use, one of the next 19 ports is used.

    Returns:
        The running server.

    Raises:
        LookupError, OSError: A path is neither a storage path nor a run, or no port is free.
        ImportError, ValueError: A URI needs a package that is not installed, or is not valid.

    Example:
        Show the URL of a storage path:

            server = ui.start_server(["/shared/runs"])
            print(server.url)
    """
    index = _open_index(paths)
    return RunningServer(UiServer(index, host, port, _make_info(index)))


def export_html(paths: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> Path:
    """Write one HTML file with the pages of runs. It opens without a server and a network.

    Args:
        paths: Storage paths, run directories, URIs, or names of runs in the default storage path.
        output: File to write. An existing file is replaced when the new one is complete. Symbolic
            links are followed.

    Returns:
        The file.

    Raises:
        LookupError: A path is neither a storage path nor a run.
        OSError: A path cannot be read, or the file cannot be written.
        ValueError: There are no runs, or too many for one file, or `output` is a file of a run.

    Example:
        Archive the page of a run:

            ui.export_html(["/shared/runs/experiment"], "experiment.html")
    """
    path = Path(output)
    check_output(path)
    index = _open_index(paths)
    write_output(path, render_page(index, _make_info(index)))
    return path


def list_run_summaries(paths: Sequence[str | os.PathLike[str]] = ()) -> list[dict[str, Any]]:
    """Return the list of runs as the web page shows it.

    Args:
        paths: Storage paths, run directories, URIs, or names of runs in the default storage path.
            Default: the default storage path.

    Returns:
        For each run, its name, path, status, times in seconds since the epoch, number of attempts,
        workers, and failures, last metrics, progress, and goodput. Unknown values are None.

    Raises:
        LookupError, OSError: A path is neither a storage path nor a run.

    Example:
        Print the status of all runs:

            for run in ui.list_run_summaries(["/shared/runs"]):
                print(run["name"], run["status"])
    """
    return [summarize_run(run) for run in _open_index(paths).refresh().values()]


def _open_index(paths: Sequence[str | os.PathLike[str]]) -> RunIndex:
    """Read the runs of paths.

    Raises:
        LookupError: None of the paths can be read.
    """
    index = RunIndex([_make_absolute(os.fspath(path)) for path in paths])
    runs = index.refresh()
    if paths and not runs and len(index.errors) >= len(paths):
        raise LookupError("; ".join(index.errors))
    return index


def _make_absolute(path: str) -> str:
    """Return the absolute path of a local path. URIs and names of runs stay as they are.

    A relative path to a deleted directory would look like the name of a run.
    """
    path = os.path.expanduser(path)
    is_local = "://" not in path and ("/" in path or os.path.exists(path))
    if not is_local or path.startswith("~"):  # a user who does not exist, which is reported later
        return path
    return str(Path(path).absolute())


def _make_info(index: RunIndex) -> dict[str, Any]:
    runs, paths = list(index.refresh().values()), index.paths
    name = os.path.basename(paths[0].rstrip("/")) if len(paths) == 1 else ""
    is_run = len(runs) == 1 and bool(name) and runs[0].record.path.rstrip("/").endswith(f"/{name}")
    return {
        "drawbar_version": _get_version(),
        "storages": paths,
        "only_run": runs[0].id if is_run else None,
        "can_stop": False,
        "export": False,
    }


def _get_version() -> str:
    try:
        return version("drawbar")
    except PackageNotFoundError:
        return ""
