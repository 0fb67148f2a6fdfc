"""Write another way to start runs, for example in the processes of a scheduler.

A `RunMode` starts a run and returns a `RunView` of it. `DataParallelTrainer.get_run_mode` returns
the mode of a trainer.
"""

from drawbar._base.api import set_public_module
from drawbar._base.ray_probe import check_reachable
from drawbar._modes.run_modes import ProgramMode
from drawbar.train._driver.run_view import RunMode, RunView

__all__ = ["ProgramMode", "RunMode", "RunView", "check_reachable"]

set_public_module(globals())
