"""drawbar ui: web pages of runs."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from drawbar.cli._arguments import DEFAULT_STORAGE_HELP, command_errors
from drawbar.cli._output import escape_control_chars


def ui(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STORAGE|RUN",
            help=f"Storage paths, run directories, URIs, or run names. {DEFAULT_STORAGE_HELP}",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. Others than 127.0.0.1 need the printed token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port. If it is in use, the next free one.")
    ] = 8330,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write one HTML file that opens without a server, and exit.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser: status, failures, curves, goodput, and logs."""
    from drawbar.ui import export_html, start_server  # other commands do not need it

    with command_errors():
        if output is not None:
            print(escape_control_chars(str(export_html(paths or [], output).absolute())))
            return
        server = start_server(paths or [], host=host, port=port)
    with contextlib.suppress(KeyboardInterrupt), server:
        print(f"Runs are shown at {server.url}\nPress Ctrl-C to end the server.", flush=True)
        if browser:
            webbrowser.open(server.url)
        server.wait()
