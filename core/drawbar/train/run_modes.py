"""Write another way to start runs, for example in the processes of a scheduler.

A `RunMode` starts a run and returns a `RunView` of it. `DataParallelTrainer.get_run_mode` returns
the mode of a trainer.

A mode can start another mode, such as the one of `super().get_run_mode()`, run the functions in
threads (`ProgramMode`), or start one process per rank (`LauncherMode`).
"""

from drawbar._base.api import set_public_module
from drawbar._handle.run_outcome import RunOutcome
from drawbar._handle.run_view import RunMode, RunView
from drawbar._modes.run_modes import ProgramMode
from drawbar._modes.torchrun_run import LauncherMode
from drawbar._ray_connection.ray_probe import check_reachable, find_running_cluster
from drawbar._records.timeline import RunState
from drawbar.train._controller.run import RunSpec
from drawbar.train._worker.train_loop import TrainLoop

__all__ = [
    "LauncherMode",
    "ProgramMode",
    "RunMode",
    "RunOutcome",
    "RunSpec",
    "RunState",
    "RunView",
    "TrainLoop",
    "check_reachable",
    "find_running_cluster",
]

set_public_module(globals())
