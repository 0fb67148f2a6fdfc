"""Run a training function on a group of Ray actors.

Example:
    Train on two workers:

        from drawbar import train

        def train_func(config):
            for epoch in range(config["epochs"]):
                ...
                train.report({"loss": loss})

        result = train.DataParallelTrainer(
            train_func,
            train_loop_config={"epochs": 3},
            scaling_config=train.ScalingConfig(num_workers=2),
        ).fit()
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from drawbar._base.packages import find_shadowing_file as _find_shadowing_file
from drawbar._data.data_config import DataConfig
from drawbar._migration.import_paths import ALIASES as _ALIASES
from drawbar._migration.import_paths import explain_missing_name as _explain_missing_name
from drawbar._migration.import_paths import install_aliases as _install_aliases
from drawbar._modes.session_client import get_program_session as _get_program_session
from drawbar._observe.instrumentation import phase, set_progress, step
from drawbar._process.errors import (
    CheckpointError,
    ControllerError,
    DamagedRunError,
    DivergenceError,
    HangError,
    InsufficientResourcesError,
    PreemptionError,
    PreemptionInfo,
    ProgramFailedError,
    ResumeError,
    RunInProgressError,
    StorageError,
    TrainingFailedError,
    UnsupportedFormatError,
    UserAbort,
    WorkerGroupError,
)
from drawbar._process.worker_failure import WorkerError, WorkerFailure
from drawbar._records.checkpoint_config import CheckpointConfig
from drawbar._recovery.failure_config import FailureConfig
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.manifest import Manifest, ReportedCheckpointStatus
from drawbar.train import backend, collective
from drawbar.train._config.checkpoint_modes import CheckpointConsistencyMode, CheckpointUploadMode
from drawbar.train._config.data_source import TRAIN_DATASET_KEY
from drawbar.train._config.run_config import (
    AttemptInfo,
    LoggingConfig,
    RunConfig,
    RunContext,
    RunEndInfo,
    UserCallback,
)
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._config.validation_config import (
    ValidationConfig,
    ValidationFn,
    ValidationTaskConfig,
)
from drawbar.train._worker.active_session import (
    set_program_session_finder as _set_program_session_finder,
)
from drawbar.train._worker.context import (
    ReportedCheckpoint,
    checkpoint_dir,
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    get_preemption_info,
    report,
    rollback,
    should_checkpoint,
)
from drawbar.train._worker.train_context import StorageContext, TrainContext
from drawbar.train.backend import Backend, BackendConfig

if TYPE_CHECKING:  # provided by __getattr__ at run time
    from drawbar._data.data_ledger import DataLedger, DatasetEpoch
    from drawbar._handle.result import Result
    from drawbar._handle.run_handle import RunHandle
    from drawbar._modes.attach import attach
    from drawbar._observe.goodput import Goodput
    from drawbar._records.timeline import AttemptTimes, Timeline
    from drawbar.train import health as health
    from drawbar.train import huggingface as huggingface
    from drawbar.train import jax as jax
    from drawbar.train import keras as keras
    from drawbar.train import lightgbm as lightgbm
    from drawbar.train import lightning as lightning
    from drawbar.train import tensorflow as tensorflow
    from drawbar.train import torch as torch
    from drawbar.train import xgboost as xgboost
    from drawbar.train._trainer import DataParallelTrainer
    from drawbar.train.torch import save_async as save_async

__all__ = [
    "TRAIN_DATASET_KEY",
    "AttemptInfo",
    "AttemptTimes",
    "Backend",
    "BackendConfig",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointError",
    "CheckpointUploadMode",
    "ControllerError",
    "DamagedRunError",
    "DataConfig",
    "DataLedger",
    "DataParallelTrainer",
    "DatasetEpoch",
    "DivergenceError",
    "FailureConfig",
    "Goodput",
    "HangError",
    "InsufficientResourcesError",
    "LoggingConfig",
    "Manifest",
    "PreemptionError",
    "PreemptionInfo",
    "ProgramFailedError",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "ResumeError",
    "RunConfig",
    "RunContext",
    "RunEndInfo",
    "RunHandle",
    "RunInProgressError",
    "ScalingConfig",
    "StorageContext",
    "StorageError",
    "Timeline",
    "TrainContext",
    "TrainingFailedError",
    "UnsupportedFormatError",
    "UserAbort",
    "UserCallback",
    "ValidationConfig",
    "ValidationFn",
    "ValidationTaskConfig",
    "WorkerError",
    "WorkerFailure",
    "WorkerGroupError",
    "attach",
    "backend",
    "checkpoint_dir",
    "collective",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "phase",
    "report",
    "rollback",
    "set_progress",
    "should_checkpoint",
    "step",
]

_INTEGRATIONS = (
    "huggingface",
    "jax",
    "keras",
    "lightgbm",
    "lightning",
    "tensorflow",
    "torch",
    "xgboost",
)
_HISTORY_NAMES = {
    "AttemptTimes": "drawbar._records.timeline",
    "DataLedger": "drawbar._data.data_ledger",
    "DatasetEpoch": "drawbar._data.data_ledger",
    "Goodput": "drawbar._observe.goodput",
    "Result": "drawbar._handle.result",
    "Timeline": "drawbar._records.timeline",
}
"""Names imported on first use, because workers do not need them and start faster without them."""

_DRIVER_NAMES = {
    "DataParallelTrainer": "drawbar.train._trainer",
    "RunHandle": "drawbar._handle.run_handle",
}
"""Names imported on first use, because commands that only read runs do not need them."""

_ATTACH_NAMES = {"attach": "drawbar._modes.attach"}
"""Names imported on first use, because trainers do not need them."""

if not TYPE_CHECKING:  # with __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import trainers, results, and integrations such as `train.torch` on first use."""
        for names in (_DRIVER_NAMES, _ATTACH_NAMES, _HISTORY_NAMES):
            if name not in names:
                continue
            if names is not _HISTORY_NAMES and _find_shadowing_file("ray"):
                # a run would fail with an unrelated error
                raise backend.make_import_error("ray", extra="")
            return _import_names(names)[name]
        if name in (*_INTEGRATIONS, "health") or name in _ALIASES:
            return importlib.import_module(f"{__name__}.{name}")
        if name == "save_async":
            return importlib.import_module(f"{__name__}.torch").save_async
        if reason := _explain_missing_name(__name__, name):
            raise AttributeError(reason, name=name, obj=sys.modules[__name__])
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )


def _import_names(modules: dict[str, str]) -> dict[str, Any]:
    """Import names from their modules into this one and return them."""
    names = {name: getattr(importlib.import_module(modules[name]), name) for name in modules}
    globals().update(names)
    backend.set_public_module(globals())
    return names


def __dir__() -> list[str]:
    return sorted({*__all__, *_INTEGRATIONS})


_install_aliases()
_set_program_session_finder(_get_program_session)
backend.set_public_module(globals())
