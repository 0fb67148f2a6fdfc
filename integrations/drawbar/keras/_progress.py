"""How far training has come, which lies beside the model in a checkpoint and is known of a model.

`progress.json` has what is one value each, `progress.npz` the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from drawbar.keras._allreduce import AllReduce, to_numpy
from drawbar.keras._backend import current_keras_backend
from drawbar.keras._types import Model, Tensor, Variable
from drawbar.train import collective, get_context

VALUES_FILE = "progress.json"
ARRAYS = "progress.npz"
GENERATORS = "generators"


@dataclass
class FitProgress:
    """What is done.

    Args:
        epochs: Whole epochs.
        batches: Batches of the epoch after them.
        events: How often each event was heard of.
        callbacks: The state of other callbacks.
        arrays: Lists of arrays, by name: of the metrics, of random seeds, of callbacks.
        is_before_end: Whether the data has not heard yet of the last of these epochs' end.
        stopped_in: The id of the run in which a callback has stopped training there; or nothing.
    """

    epochs: int = 0
    batches: int = 0
    events: dict[str, int] = field(default_factory=dict)
    callbacks: list[dict[str, object]] = field(default_factory=list)
    arrays: dict[str, list[Any]] = field(default_factory=dict)
    is_before_end: bool = False
    stopped_in: str = ""

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint."""
        values = {**vars(self)}
        arrays = values.pop("arrays")
        (folder / VALUES_FILE).write_text(json.dumps(values))
        numbered = {f"{name}/{i}": each for name in arrays for i, each in enumerate(arrays[name])}
        if numbered:
            import numpy as np

            np.savez(folder / ARRAYS, **numbered)

    @classmethod
    def read(cls, folder: Path) -> FitProgress:
        """Read how far a checkpoint has come; nowhere if it does not say."""
        if not (folder / VALUES_FILE).exists():
            return cls()
        progress = cls(**json.loads((folder / VALUES_FILE).read_text()))
        if (folder / ARRAYS).exists():
            import numpy as np

            with np.load(folder / ARRAYS) as numbered:
                for name in numbered.files:  # in the order in which they were written
                    progress.arrays.setdefault(name.rpartition("/")[0], []).append(numbered[name])
        return progress


def _identity_allreduce(tensors: Sequence[Tensor], weight: object = None) -> list[Tensor]:
    return list(tensors)


@dataclass
class ModelState:
    """What is known of a model.

    Args:
        totals: Sums over the ranks; of one that JAX computes on all ranks, or of one rank, nothing
            is left to sum up.
        begun: The progress that was loaded, until a `fit` has gone on with it.
        rows: How many rows this worker has of the batch, while a step runs on it.
        last_rows: A variable: how many it had of the last batch.
        is_prepared: Whether all workers train it together.
    """

    allreduce: AllReduce = _identity_allreduce
    loaded_progress: FitProgress = field(default_factory=FitProgress)
    rows: Any = None
    last_rows: Any = None
    is_prepared: bool = False


_trainings: WeakKeyDictionary[object, ModelState] = WeakKeyDictionary()


def model_state(model: object) -> ModelState:
    """Give what is known of a model, which may be nothing yet."""
    return _trainings.setdefault(model, ModelState())


def extra_state(model: Model) -> dict[str, list[Any]]:
    """Give what a model's own file leaves out. Ranks with replicas must all call it."""
    if not hasattr(model, "metrics_variables"):  # of Keras 2
        return {}
    metrics = model_state(model).allreduce([each.value for each in model.metrics_variables])
    return {
        "metrics": [to_numpy(each) for each in metrics],
        "seeds": [each.numpy() for each in _seed_variables(model)],
        GENERATORS: collective.all_gather(_torch_rng_state())
        if current_keras_backend() == "torch"
        else [],
    }


def restore_seeds(model: Model, progress: FitProgress) -> None:
    """Have a model draw the numbers that it would have drawn."""
    restore_torch_rng(progress)
    if found := progress.arrays.get("seeds"):
        for variable, value in zip(_seed_variables(model), found, strict=False):
            variable.assign(value)


def restore_torch_rng(progress: FitProgress) -> None:
    """Have PyTorch draw the numbers that it would have drawn, on each rank its own."""
    if states := progress.arrays.get(GENERATORS):
        rank = get_context().get_world_rank()
        _set_torch_rng_state(states[rank if rank < len(states) else 0])


def restore_metrics(model: Model, progress: FitProgress) -> None:
    """Add what all ranks had gathered for metrics, on one of them if they are to be added up."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    if model_state(model).allreduce is _identity_allreduce or get_context().get_world_rank() == 0:
        pairs = zip(model.metrics_variables, progress.arrays.get("metrics", []), strict=False)
        for variable, value in pairs:
            variable.assign(variable.numpy() + value)


def _torch_rng_state() -> Any:
    """Give the state of PyTorch's own generators, which draw what a layer has no seed for."""
    import numpy as np
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return np.concatenate([each.numpy() for each in states])


def _set_torch_rng_state(state: Any) -> None:
    import torch

    on_cpu = len(torch.get_rng_state())
    torch.set_rng_state(torch.from_numpy(state[:on_cpu]))
    if len(state) > on_cpu and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state[on_cpu:]))


def _seed_variables(model: Model) -> list[Variable]:
    return [each for each in model.variables if "float" not in each.dtype]
