"""Run a training function on a group of Ray actors.

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

from drawbar.train import backend, collective
from drawbar.train._callback import RunContext, UserCallback
from drawbar.train._checkpoint import Checkpoint
from drawbar.train._config import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
)
from drawbar.train._context import (
    ReportedCheckpoint,
    TrainContext,
    checkpoint_dir,
    checkpoint_requested,
    get_all_reported_checkpoints,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    get_preemption_info,
    report,
)
from drawbar.train._errors import (
    CheckpointError,
    ControllerError,
    DamagedRunError,
    DivergenceError,
    HangError,
    InsufficientResourcesError,
    JournalLockedError,
    PreemptionError,
    ResumeError,
    StorageError,
    TrainingFailedError,
    UserAbort,
    WorkerError,
    WorkerFailure,
    WorkerGroupError,
)
from drawbar.train._handle import RunHandle, attach
from drawbar.train._manifest import Manifest
from drawbar.train._preemption import PreemptionInfo
from drawbar.train._result import Result
from drawbar.train._scaling import ScalingConfig
from drawbar.train._timeline import AttemptTimes, Timeline
from drawbar.train._trainer import DataParallelTrainer
from drawbar.train._upload import CheckpointUploadMode
from drawbar.train._validation import (
    CheckpointConsistencyMode,
    ReportedCheckpointStatus,
    ValidationConfig,
    ValidationFn,
    ValidationTaskConfig,
)
from drawbar.train.backend import Backend, BackendConfig

__all__ = [
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
    "DataParallelTrainer",
    "DivergenceError",
    "FailureConfig",
    "HangError",
    "InsufficientResourcesError",
    "JournalLockedError",
    "LoggingConfig",
    "Manifest",
    "PreemptionError",
    "PreemptionInfo",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "ResumeError",
    "RunConfig",
    "RunContext",
    "RunHandle",
    "ScalingConfig",
    "StorageError",
    "Timeline",
    "TrainContext",
    "TrainingFailedError",
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
    "checkpoint_requested",
    "collective",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "report",
]
