"""Lightning Trainer on Ray, for `lightning` and `pytorch_lightning`."""

from drawbar.lightning._environment import RayLightningEnvironment
from drawbar.lightning._global_batch_size import GlobalBatchSize
from drawbar.lightning._logger import DrawbarLogger
from drawbar.lightning._package import set_lightning_package
from drawbar.lightning._prepare import prepare_trainer
from drawbar.lightning._report_callback import RayTrainReportCallback
from drawbar.lightning._strategies.deepspeed import RayDeepSpeedStrategy
from drawbar.lightning._strategies.fsdp import RayFSDPStrategy
from drawbar.lightning._strategies.model_parallel import RayModelParallelStrategy
from drawbar.lightning._strategies.strategy import RayDDPStrategy, RayStrategy
from drawbar.train.backend import set_public_module

__all__ = [
    "DrawbarLogger",
    "GlobalBatchSize",
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayModelParallelStrategy",
    "RayStrategy",
    "RayTrainReportCallback",
    "prepare_trainer",
    "set_lightning_package",
]

set_public_module(globals())
