"""Lightning's Trainer on a group of Ray actors, with `lightning` or with `pytorch_lightning`."""

from drawbar.lightning._environment import RayLightningEnvironment
from drawbar.lightning._logger import JournalLogger
from drawbar.lightning._loop import prepare_trainer
from drawbar.lightning._package import use_package
from drawbar.lightning._report import RayTrainReportCallback
from drawbar.lightning._strategies.deepspeed import RayDeepSpeedStrategy
from drawbar.lightning._strategies.fsdp import RayFSDPStrategy
from drawbar.lightning._strategies.model_parallel import RayModelParallelStrategy
from drawbar.lightning._strategies.strategy import RayDDPStrategy, RayStrategy
from drawbar.train.backend import as_public

__all__ = [
    "JournalLogger",
    "RayDDPStrategy",
    "RayDeepSpeedStrategy",
    "RayFSDPStrategy",
    "RayLightningEnvironment",
    "RayModelParallelStrategy",
    "RayStrategy",
    "RayTrainReportCallback",
    "prepare_trainer",
    "use_package",
]

as_public(globals())
