"""How the workers of one framework meet: the contract for integrations.

An integration is a `BackendConfig` (what the user sets) and its `Backend` (what is done with it).
Most need no more than `train_func_context`, which runs on each worker around the training function
and may use `drawbar.train.collective` to agree on an address; it costs no round trip of its own.
The three hooks of `Backend` run in the controller, for frameworks that need something there, such
as a tracker.
"""

from __future__ import annotations

from drawbar.train._public import as_public
from drawbar.train._settings.backend import (
    Backend,
    BackendConfig,
    LauncherStore,
    TrainFunction,
    WorkerGroupView,
)
from drawbar.train._settings.checks import config_or_default, require_duration
from drawbar.train._settings.driver import Driver
from drawbar.train._settings.packages import import_failed, require_package, require_version
from drawbar.train._surroundings import enter_trial
from drawbar.train._worker.addresses import node_address, worker_address
from drawbar.train._worker.integration import (
    align_reports,
    attempt_local,
    begin_training,
    collectives_called,
    common_checkpoint,
    discard_checkpoint,
    inherited_checkpoint,
    keep_data_position,
    remark,
    report_soon,
    retire_process,
)
from drawbar.train._worker.program import run_program

__all__ = [
    "Backend",
    "BackendConfig",
    "Driver",
    "LauncherStore",
    "TrainFunction",
    "WorkerGroupView",
    "align_reports",
    "as_public",
    "attempt_local",
    "begin_training",
    "collectives_called",
    "common_checkpoint",
    "config_or_default",
    "discard_checkpoint",
    "enter_trial",
    "import_failed",
    "inherited_checkpoint",
    "keep_data_position",
    "node_address",
    "remark",
    "report_soon",
    "require_duration",
    "require_package",
    "require_version",
    "retire_process",
    "run_program",
    "worker_address",
]

as_public(globals())
