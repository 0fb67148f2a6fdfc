"""Training progress stored next to the model in a checkpoint.

Scalars are stored in `progress.json`, arrays in `progress.npz`.
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
ARRAYS_FILE = "progress.npz"
GENERATORS = "generators"


@dataclass
class FitProgress:
    """Progress of `fit`.

    Args:
        epochs: Number of completed epochs.
        batches: Number of completed batches in the next epoch.
        events: Number of calls of each Keras callback method, by event name such as "epoch_end".
        callbacks: Scalar attributes of each callback in `stateful_callbacks`.
        arrays: Lists of arrays by name: metrics, random seeds, and attributes of callbacks.
        should_call_epoch_end: Whether the checkpoint was saved after the last batch of an epoch but
            before Keras called `on_epoch_end` of the dataset.
        stopped_run_id: ID of the run whose training a callback stopped at this checkpoint, or "".
    """

    epochs: int = 0
    batches: int = 0
    events: dict[str, int] = field(default_factory=dict)
    callbacks: list[dict[str, object]] = field(default_factory=list)
    arrays: dict[str, list[Any]] = field(default_factory=dict)
    should_call_epoch_end: bool = False
    stopped_run_id: str = ""

    def write(self, directory: Path) -> None:
        """Write the progress to a checkpoint directory."""
        values = {**vars(self)}
        arrays = values.pop("arrays")
        (directory / VALUES_FILE).write_text(json.dumps(values))
        numbered = {
            f"{name}/{index}": array for name in arrays for index, array in enumerate(arrays[name])
        }
        if numbered:
            import numpy as np

            np.savez(directory / ARRAYS_FILE, **numbered)

    @classmethod
    def read(cls, directory: Path) -> FitProgress:
        """Read the progress from a checkpoint directory. Return the defaults if it has no file."""
        if not (directory / VALUES_FILE).exists():
            return cls()
        progress = cls(**json.loads((directory / VALUES_FILE).read_text()))
        if (directory / ARRAYS_FILE).exists():
            import numpy as np

            with np.load(directory / ARRAYS_FILE) as numbered:
                for name in numbered.files:  # in the order in which they were written
                    progress.arrays.setdefault(name.rpartition("/")[0], []).append(numbered[name])
        return progress


def identity_allreduce(tensors: Sequence[Tensor], weight: object = None) -> list[Tensor]:
    """Return the tensors unchanged: the sums over one rank."""
    return list(tensors)


@dataclass
class ModelState:
    """State of a model in this process.

    Args:
        allreduce: Sums tensors over the ranks. It returns them unchanged with one rank and with
            JAX, which computes one model over all workers.
        loaded_progress: Progress of the loaded checkpoint, until a `fit` has resumed from it.
        epochs: Number of completed epochs, also after `fit`.
        batches: Number of completed batches in the next epoch, if they are counted.
        rows: Number of this worker's rows in the batch during a step, otherwise None.
        last_rows: Keras variable that keeps `rows` of the latest step.
    """

    allreduce: AllReduce = identity_allreduce
    loaded_progress: FitProgress = field(default_factory=FitProgress)
    epochs: int = 0
    batches: int = 0
    rows: Any = None
    last_rows: Any = None


_states: WeakKeyDictionary[object, ModelState] = WeakKeyDictionary()


def model_state(model: object) -> ModelState:
    """Return the state of a model. The first call for a model creates it."""
    return _states.setdefault(model, ModelState())


def extra_state(model: Model) -> dict[str, list[Any]]:
    """Return state that Keras does not save with a model. All ranks must call this function."""
    if not hasattr(model, "metrics_variables"):  # Keras 2
        return {}
    metrics = model_state(model).allreduce([variable.value for variable in model.metrics_variables])
    return {
        "metrics": [to_numpy(metric) for metric in metrics],
        "seeds": [variable.numpy() for variable in _seed_variables(model)],
        GENERATORS: collective.all_gather(_torch_rng_state())
        if current_keras_backend() == "torch"
        else [],
    }


def restore_seeds(model: Model, progress: FitProgress) -> None:
    """Restore the random seeds of a model and of PyTorch."""
    restore_torch_rng(progress)
    if seeds := progress.arrays.get("seeds"):
        for variable, value in zip(_seed_variables(model), seeds, strict=False):
            variable.assign(value)


def restore_torch_rng(progress: FitProgress) -> None:
    """Restore the random generators of PyTorch with the state of this rank."""
    if states := progress.arrays.get(GENERATORS):
        rank = get_context().get_world_rank()
        _set_torch_rng_state(states[rank if rank < len(states) else 0])


def restore_metrics(model: Model, progress: FitProgress) -> None:
    """Add the saved metrics to the metrics of a model.

    If every rank has a replica of the model, only rank 0 adds them, because the metrics of all
    ranks are summed when they are read.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
    if model_state(model).allreduce is identity_allreduce or get_context().get_world_rank() == 0:
        pairs = zip(model.metrics_variables, progress.arrays.get("metrics", []), strict=False)
        for variable, value in pairs:
            variable.assign(variable.numpy() + value)


def _torch_rng_state() -> Any:
    """Return the state of PyTorch's global generators, used by layers without their own seed."""
    import numpy as np
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return np.concatenate([state.numpy() for state in states])


def _set_torch_rng_state(state: Any) -> None:
    import torch

    cpu_size = len(torch.get_rng_state())
    torch.set_rng_state(torch.from_numpy(state[:cpu_size]))
    if len(state) > cpu_size and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(state[cpu_size:]))


def _seed_variables(model: Model) -> list[Variable]:
    return [variable for variable in model.variables if "float" not in variable.dtype]
