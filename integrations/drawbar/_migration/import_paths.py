"""Import paths and names of `ray.train` that `drawbar.train` has elsewhere, or does not have.

Ray Train exports most objects under several paths, such as `ray.train.torch.TorchTrainer` and
`ray.train.torch.torch_trainer.TorchTrainer`, and scripts use all of them. Drawbar has one file for
a public path. The other paths are aliases, which `_AliasFinder` creates when they are imported.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = "drawbar.train"
_V2_FRAMEWORKS = ("jax", "lightgbm", "tensorflow", "torch", "xgboost")
_V1_FRAMEWORKS = ("lightgbm", "tensorflow", "torch", "xgboost")
_BOOSTING = ("lightgbm", "xgboost")

ALIASES = {
    "_checkpoint": "",
    "base_trainer": "",
    "collective.collectives": "collective",
    "context": "",
    "data_parallel_trainer": "",
    "error": "",
    "huggingface.transformers._transformers_utils": "huggingface.transformers",
    "lightning._lightning_utils": "lightning",
    "session": "",
    "tensorflow.train_loop_utils": "tensorflow",
    "torch.train_loop_utils": "torch",
    "torch.xla": "torch",
    "torch.xla.config": "torch",
    "trainer": "",
    **{f"{name}.config": name for name in _V1_FRAMEWORKS},
    **{f"{name}.{name}_checkpoint": name for name in _V1_FRAMEWORKS},
    **{f"{name}.{name}_trainer": name for name in _V1_FRAMEWORKS},
    **{f"{name}._{name}_utils": name for name in _BOOSTING},
    **{f"{name}.v2": name for name in _BOOSTING},
    "v2": "",
    "v2.api": "",
    "v2.api.callback": "",
    "v2.api.config": "",
    "v2.api.context": "",
    "v2.api.data_parallel_trainer": "",
    "v2.api.exceptions": "",
    "v2.api.preemption": "",
    "v2.api.report_config": "",
    "v2.api.reported_checkpoint": "",
    "v2.api.result": "",
    "v2.api.train_fn_utils": "",
    "v2.api.validation_config": "",
    "v2.jax.config": "jax",
    "v2.torch.torchft_config": "torch",
    "v2.torch.train_loop_utils": "torch",
    "v2.xgboost.config": "xgboost",
    **{f"v2.{name}": name for name in _V2_FRAMEWORKS},
    **{f"v2.{name}.{name}_trainer": name for name in _V2_FRAMEWORKS},
}
"""Paths below `drawbar.train`, each with the path of the module that has its objects."""

_HOROVOD = "use drawbar.train.torch.TorchTrainer and torch.distributed"
_INTERNAL = "it is internal to Ray Train. Import public names from drawbar.train"

_CONTEXT_FUNCTIONS = (
    "get_experiment_name",
    "get_local_rank",
    "get_local_world_size",
    "get_metadata",
    "get_node_rank",
    "get_trial_dir",
    "get_trial_id",
    "get_trial_name",
    "get_trial_resources",
    "get_world_rank",
    "get_world_size",
)

REPLACEMENTS = {
    "BaseTrainer": "use drawbar.train.DataParallelTrainer",
    "DistributedTrainContext": "use drawbar.train.TrainContext",
    "GenDataset": "use ray.data.Dataset | Callable[[], ray.data.Dataset]",
    "HorovodConfig": _HOROVOD,
    "HorovodTrainer": _HOROVOD,
    "LighthouseServerActor": "leave it out: TorchftConfig replaces failed workers without torchft, "
    "and needs no lighthouse",
    "LocalTrainContext": "use drawbar.train.TrainContext",
    "NCCLHangError": "catch drawbar.train.HangError, for any backend; FailureConfig(hang_timeout=)",
    "RayReportCallback": "derive from RayTrainReportCallback, or from Keras's "
    "ReportCheckpointCallback",
    "RayTorchIterableDataset": _INTERNAL,
    "RayTrainCallback": "derive from drawbar.train.UserCallback",
    "SessionMisuseError": "catch RuntimeError, which functions such as drawbar.train.report raise "
    "outside a training function",
    "SyncConfig": "leave it out: Drawbar uploads checkpoints, the journal, and logs",
    "TorchConfigContextManager": "leave it out: drawbar.train.torch.TorchTrainer selects the "
    "device of each worker",
    "TorchWorkerProfiler": "use torch.profiler.profile in the training function",
    "TrainingIterator": "pass a drawbar.train.UserCallback in RunConfig(callbacks=), or call "
    "trainer.start() and read RunHandle.metrics",
    "_internal": _INTERNAL,
    "constants": "Drawbar does not read RAY_TRAIN_* variables. Use the config classes of "
    "drawbar.train, such as RunConfig(storage_path=)",
    "format_datasets_for_repr": _INTERNAL,
    "horovod": _HOROVOD,
    "import_lightning": "import lightning.pytorch or pytorch_lightning",
    "utils": _INTERNAL,
    **{name: f"call drawbar.train.get_context().{name}()" for name in _CONTEXT_FUNCTIONS},
}
"""Names of Ray Train without a counterpart, each with the replacement to suggest."""


def find_public_module(path: str) -> str:
    """Return the module that has the objects of an import path of Ray Train.

    Args:
        path: Path with `drawbar.train` in place of `ray.train`.

    Returns:
        The path of the module, which is `path` itself if it is not an alias.

    Example:
        >>> find_public_module("drawbar.train.torch.config")
        'drawbar.train.torch'
    """
    alias = path.removeprefix(f"{_PACKAGE}.")
    return f"{_PACKAGE}.{ALIASES[alias]}".rstrip(".") if alias in ALIASES else path


def explain_missing_name(module: str, name: str) -> str | None:
    """Describe what replaces a name of Ray Train that Drawbar does not have.

    Args:
        module: Module that lacks the name.
        name: Name of a class, function, or submodule of Ray Train.

    Returns:
        Text of an error or a note; None for other names.

    Example:
        >>> explain_missing_name("drawbar.train", "BaseTrainer")
        'drawbar.train has no BaseTrainer: use drawbar.train.DataParallelTrainer'
    """
    return f"{module} has no {name}: {REPLACEMENTS[name]}" if name in REPLACEMENTS else None


class _AliasModule(ModuleType):
    """Module that provides the objects of another module, which is imported on first use."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if find_public_module(path) != path:
            return importlib.import_module(path)
        if reason := explain_missing_name(self.__name__, name):
            raise AttributeError(reason, name=name, obj=self)
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        return getattr(importlib.import_module(find_public_module(self.__name__)), name)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle pickles the submodules of a package that a training function uses.
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(find_public_module(self.__name__)))


class _AliasFinder(Loader):
    """Create aliases when they are imported, and raise errors that name replacements."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return the spec of an alias.

        Raises:
            ImportError: The module is one of Ray Train that Drawbar does not have. Also raised by
                `from drawbar.train import NAME`, which looks for a submodule if there is no
                attribute.
        """
        if not name.startswith(f"{_PACKAGE}."):
            return None
        if find_public_module(name) != name:
            return ModuleSpec(name, self, is_package=True)
        if reason := explain_missing_name(*name.rsplit(".", 1)):
            raise ImportError(reason, name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create an alias."""
        return _AliasModule(spec.name, f"`{find_public_module(spec.name)}` under another path.")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the other module is imported on first use."""


def install_aliases() -> None:
    """Let Python find the aliases, after all modules that exist as files."""
    sys.meta_path.append(_AliasFinder())
