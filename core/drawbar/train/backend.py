"""Public API for framework integrations.

An integration consists of a `BackendConfig` (user settings) and its `Backend` (hooks that run in
the controller). Most integrations only need `BackendConfig.train_func_context`, which wraps the
training function on each worker and may use `drawbar.train.collective` to agree on an address,
without a separate round trip. The hooks of `Backend` are for frameworks that need something in the
controller, such as a tracker.
"""

from __future__ import annotations

from drawbar._base.api import set_public_module
from drawbar._base.fields import at_least, parse_duration, resolve_config
from drawbar._base.import_paths import explain_missing_name, find_public_module
from drawbar._base.packages import (
    import_private,
    make_import_error,
    require_package,
    require_version,
)
from drawbar._base.secrets import redact_arguments
from drawbar._base.train_function import TrainFunction
from drawbar._modes.program_output import ProgramOutput
from drawbar._modes.program_process import run_program
from drawbar._modes.report_async import report_async
from drawbar._process.batch_counter import register_batch_description
from drawbar._process.collective_calls import GroupCalls, collective_calls
from drawbar._process.driver_env import DriverContext, set_tune_trial
from drawbar._process.exit_codes import EXIT_DO_NOT_RETRY
from drawbar._process.worker_env import get_visible_gpu_ids
from drawbar._recovery.rank_recovery import RankRecovery
from drawbar._storage.memory_files import MemoryFiles
from drawbar.train._config.backend import Backend, BackendConfig, BackendWorkerGroup, LauncherStore
from drawbar.train._config.data_source import DataSource
from drawbar.train._worker.context import get_node_address, get_worker_address
from drawbar.train._worker.instrumentation import get_forward_callback, measure_data_wait
from drawbar.train._worker.integration_api import (
    add_final_notice,
    attempt_local,
    count_collectives,
    discard_checkpoint,
    get_agreed_checkpoint,
    get_recovery,
    get_resume_checkpoint,
    get_worker_environment,
    register_best_checkpoint,
    register_data_position,
    register_read_ahead,
    report_buffered,
    retire_process,
    start_training,
    sync_report_index,
)

__all__ = [
    "EXIT_DO_NOT_RETRY",
    "Backend",
    "BackendConfig",
    "BackendWorkerGroup",
    "DataSource",
    "DriverContext",
    "GroupCalls",
    "LauncherStore",
    "MemoryFiles",
    "ProgramOutput",
    "RankRecovery",
    "TrainFunction",
    "add_final_notice",
    "at_least",
    "attempt_local",
    "collective_calls",
    "count_collectives",
    "discard_checkpoint",
    "explain_missing_name",
    "find_public_module",
    "get_agreed_checkpoint",
    "get_forward_callback",
    "get_node_address",
    "get_recovery",
    "get_resume_checkpoint",
    "get_visible_gpu_ids",
    "get_worker_address",
    "get_worker_environment",
    "import_private",
    "make_import_error",
    "measure_data_wait",
    "parse_duration",
    "redact_arguments",
    "register_batch_description",
    "register_best_checkpoint",
    "register_data_position",
    "register_read_ahead",
    "report_async",
    "report_buffered",
    "require_package",
    "require_version",
    "resolve_config",
    "retire_process",
    "run_program",
    "set_public_module",
    "set_tune_trial",
    "start_training",
    "sync_report_index",
]

set_public_module(globals())
