"""Web pages of runs: `drawbar ui` as Python functions.

Example:
    Serve the runs of a storage path until Ctrl-C:

        from drawbar import ui

        with ui.start_server(["/shared/runs"]) as server:
            print(server.url)
            server.wait()
"""

from drawbar.train.backend import set_public_module
from drawbar.ui._public import RunningServer, export_html, list_run_summaries, start_server

__all__ = ["RunningServer", "export_html", "list_run_summaries", "start_server"]

set_public_module(globals())
