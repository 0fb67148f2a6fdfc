"""State of a rank's training, which a new process of another rank receives."""

from __future__ import annotations

import gc
import io
import random
import weakref
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from drawbar.torch._loader_registry import TrackedLoader
from drawbar.torch._tensors import iter_tensors
from drawbar.torch._weight_marks import Key, WeightMarks


class CannotRecoverError(RuntimeError):
    """The state of the ranks does not allow an in-place recovery.

    Example:
        ```python
        if state["callbacks"] != get_names(callbacks):
            raise CannotRecoverError("the new process has other callbacks")
        ```
    """


@dataclass
class LoaderRecord:
    """Iterations of one prepared loader.

    Attributes:
        tracked: Tracks the position of the loader.
        num_iterations: Number of iterations that have begun.
        is_running: Whether the latest one has not ended.
        target: State of this loader on another rank, which this rank has to reach.
    """

    tracked: TrackedLoader
    num_iterations: int = 0
    is_running: bool = False
    target: Mapping[str, Any] | None = None

    def save(self) -> dict[str, Any]:
        """Return the state of the loader."""
        return {
            "num_iterations": self.num_iterations,
            "is_running": self.is_running,
            "position": self.tracked.tracker.position() if self.num_iterations else None,
        }


@dataclass(frozen=True, kw_only=True)
class StepState:
    """State of a rank when a step was complete, without the weights.

    The other weights and the state of the optimizers do not change before the next step. If weights
    do, the state is not sent.

    Attributes:
        num_reductions: Number of backward passes whose gradients were averaged.
        counters: Numbers of the reports and collectives of the rank.
        loaders: States of the prepared loaders.
        active_loader: Number of the loader that was asked for a batch.
        settings: Settings of the parameter groups, by optimizer.
        followers: States of schedulers and averages of weights, with their names. Tensors do not
            change before the next step.
        random_states: States of the generators of Python, NumPy, and PyTorch.
        buffers: Buffers by model.
        frozen: Parameters without gradients that change nevertheless.
        loop_state: State of the loop of a framework.
    """

    num_reductions: int
    counters: tuple[int, int, int]
    loaders: list[dict[str, Any]]
    active_loader: int
    settings: list[list[dict[str, Any]]]
    followers: list[tuple[str, dict[str, Any]]]
    random_states: tuple[Any, Any, torch.Tensor]
    buffers: list[dict[str, torch.Tensor]]
    frozen: dict[Key, torch.Tensor]
    loop_state: Any = None


class TrainedObjects:
    """Models, optimizers, schedulers, and averages of weights of a rank.

    Attributes:
        models: Prepared models, without DDP.
        optimizers: Prepared optimizers.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._followers: list[tuple[str, weakref.ref[Any]]] | None = None
        self._marks = WeightMarks()

    def _find_followers(self) -> list[tuple[str, Any]]:
        """Return objects that the user's code updates after each step, with their names.

        They are the schedulers of the optimizers, and averages of weights.
        """
        if self._followers is None:
            found: list[tuple[str, Any]] = []
            for each in gc.get_objects():
                kind = type(each)
                if issubclass(kind, AveragedModel):
                    found.append((kind.__name__, each))
                elif issubclass(kind, LRScheduler | ReduceLROnPlateau):
                    for number, optimizer in enumerate(self.optimizers):
                        if getattr(each, "optimizer", None) is optimizer:
                            found.append((f"{kind.__name__} of optimizer {number}", each))
            found.sort(key=lambda pair: pair[0])
            self._followers = [(name, weakref.ref(each)) for name, each in found]
        pairs = [(name, reference()) for name, reference in self._followers]
        return [(name, each) for name, each in pairs if each is not None]

    def get_settings(self) -> list[list[dict[str, Any]]]:
        """Return the settings of the parameter groups whose values can be compared."""
        return [
            [
                {
                    name: value
                    for name, value in group.items()
                    if isinstance(value, int | float | str | tuple | None)
                }
                for group in optimizer.param_groups
            ]
            for optimizer in self.optimizers
        ]

    def capture(self, *, has_stepped: bool, **progress: Any) -> StepState:
        """Return the state after a complete step.

        Args:
            has_stepped: Whether an optimizer has made a step, so that all followers exist.
            progress: Fields of `StepState` about the progress of the rank.
        """
        found = self._find_followers() if has_stepped or self._followers else []
        followers = [(name, each.state_dict()) for name, each in found]
        return StepState(
            **progress,
            settings=self.get_settings(),
            followers=followers,
            random_states=(random.getstate(), np.random.get_state(), torch.get_rng_state()),
            buffers=[
                {name: buffer.clone() for name, buffer in model.named_buffers()}
                for model in self.models
            ],
            frozen=self._marks.capture(self.models, _list_averages(found)),
        )

    def has_captured_weights(self) -> bool:
        """Return whether weights and averages have not changed since `capture`.

        Those that `capture` has copied may have changed.
        """
        found = self._find_followers() if self._followers else []
        return self._marks.is_unchanged(self.models, _list_averages(found))

    def compute_checksum(self) -> int:
        """Return a checksum of all tensors that `capture` does not copy."""
        followers = [each.state_dict() for _, each in self._find_followers()]
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        checksum = 0
        for tensor in iter_tensors(
            [[dict(model.named_parameters()) for model in self.models], optimizers, followers]
        ):
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            checksum = zlib.crc32(data.numpy().data, checksum)
        return checksum

    def save(self, step: StepState, latest_counters: tuple[int, int, int]) -> bytes:
        """Return a captured state with the weights. No step must have been made since.

        Args:
            step: The captured state.
            latest_counters: Numbers of the reports and collectives that the rank has now.
        """
        file = io.BytesIO()
        state = {
            "step": step,
            "latest_counters": latest_counters,
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        torch.save(state, file)
        return file.getvalue()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state of another rank.

        Args:
            state: Result of `save`, as `torch.load` returns it.

        Raises:
            CannotRecoverError: It has other objects.
        """
        step: StepState = state["step"]
        followers = self._find_followers() if step.followers else []
        names = [name for name, _ in followers]
        try:
            if names != [name for name, _ in step.followers] or len(set(names)) < len(names):
                raise ValueError(f"it has {', '.join(names)}")
            for model, weights, buffers in zip(
                self.models, state["models"], step.buffers, strict=True
            ):
                model.load_state_dict(weights)
                _copy_buffers(model, buffers)
            with torch.no_grad():
                for (number, name), value in step.frozen.items():
                    self.models[number].get_parameter(name).copy_(value)
            for optimizer, saved, settings in zip(
                self.optimizers, state["optimizers"], step.settings, strict=True
            ):
                for group, values in zip(saved["param_groups"], settings, strict=True):
                    group.update(values)
                optimizer.load_state_dict(saved)
            for (_, follower), (_, saved) in zip(followers, step.followers, strict=True):
                follower.load_state_dict(saved)
        except (AttributeError, RuntimeError, ValueError, KeyError) as error:
            raise CannotRecoverError(
                f"the new process has other or ambiguous models or schedulers: {error}"
            ) from error
        python_state, numpy_state, torch_state = step.random_states
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


def _list_averages(followers: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [each.state_dict() for _, each in followers if isinstance(each, AveragedModel)]


def _copy_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Copy buffers into a model, also those that its state dict does not contain.

    Raises:
        KeyError: The model has a buffer that is not among them.
        RuntimeError: A buffer has another shape.
    """
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
