"""Base classes from Lightning for type checkers. At run time they are `object`.

The actual base class is bound later; see `LateBoundBase`. Import a name from this module
only to derive a class from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment as ClusterEnvironment
    from lightning.pytorch import Callback as Callback
    from lightning.pytorch.accelerators import CUDAAccelerator as CUDAAccelerator
    from lightning.pytorch.loggers import Logger as Logger
    from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
    from lightning.pytorch.strategies import DeepSpeedStrategy as DeepSpeedStrategy
    from lightning.pytorch.strategies import FSDPStrategy as FSDPStrategy
    from lightning.pytorch.strategies import ModelParallelStrategy as ModelParallelStrategy
    from lightning.pytorch.strategies.parallel import ParallelStrategy as ParallelStrategy
else:
    Callback = ClusterEnvironment = CUDAAccelerator = Logger = object
    ParallelStrategy = DDPStrategy = DeepSpeedStrategy = object
    FSDPStrategy = ModelParallelStrategy = object
