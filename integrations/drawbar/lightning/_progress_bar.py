"""Lightning's progress bar, on the one line that the run's console redraws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drawbar.lightning._package import Package, lightning_class

if TYPE_CHECKING:
    pass


def draw_as_text(trainer: Any, package: Package) -> None:
    """Put Lightning's tqdm bar in the place of its rich one, unless rich can redraw here.

    On a worker it cannot: its output is no terminal, and rich then draws once, when all is over.
    What tqdm writes the driver's console shows in place. A subclass of the user's own stays.
    """
    rich_bar = lightning_class("callbacks.RichProgressBar", package)
    tqdm_bar = lightning_class("callbacks.TQDMProgressBar", package)
    for place, callback in enumerate(trainer.callbacks):
        if type(callback) is rich_bar and not _rich_redraws():
            trainer.callbacks[place] = tqdm_bar(refresh_rate=callback.refresh_rate)


def _rich_redraws() -> bool:
    from rich.console import Console

    console = Console()
    return console.is_terminal or console.is_jupyter
