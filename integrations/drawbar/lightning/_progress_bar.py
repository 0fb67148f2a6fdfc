"""Lightning's progress bar, on the one line that the run's console redraws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drawbar.lightning._package import Package, import_lightning_class

if TYPE_CHECKING:
    pass


def replace_rich_progress_bar(trainer: Any, package: Package) -> None:
    """Put Lightning's tqdm bar in the place of its rich one, unless rich can redraw here.

    On a worker it cannot: its output is no terminal, and rich then draws once, when all is over.
    What tqdm writes the driver's console shows in place. A subclass of the user's own stays.
    """
    rich_bar = import_lightning_class("callbacks.RichProgressBar", package)
    tqdm_bar = import_lightning_class("callbacks.TQDMProgressBar", package)
    for place, callback in enumerate(trainer.callbacks):
        if type(callback) is rich_bar and not _can_rich_redraw():
            trainer.callbacks[place] = tqdm_bar(refresh_rate=callback.refresh_rate)


def _can_rich_redraw() -> bool:
    from rich.console import Console

    console = Console()
    return console.is_terminal or console.is_jupyter
