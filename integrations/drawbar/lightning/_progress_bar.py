"""Replace the Rich progress bar where it cannot redraw."""

from __future__ import annotations

from typing import Any

from drawbar.lightning._package import Package, import_lightning_class


def replace_rich_progress_bar(trainer: Any, package: Package) -> None:
    """Replace Lightning's Rich bar by its tqdm bar if Rich cannot redraw here.

    A worker's output is not a terminal, so that Rich would draw only once, at the end. The driver's
    console redraws the output of tqdm in place. User-defined subclasses are not replaced.
    """
    rich_bar = import_lightning_class("callbacks.RichProgressBar", package)
    tqdm_bar = import_lightning_class("callbacks.TQDMProgressBar", package)
    for index, callback in enumerate(trainer.callbacks):
        if type(callback) is rich_bar and not _can_rich_redraw():
            trainer.callbacks[index] = tqdm_bar(refresh_rate=callback.refresh_rate)


def _can_rich_redraw() -> bool:
    from rich.console import Console

    console = Console()
    return console.is_terminal or console.is_jupyter
