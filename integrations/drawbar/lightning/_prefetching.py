"""Save the state of a training data loader without the batch that Lightning has prefetched.

If Lightning does not know the number of batches, it reads one batch ahead to find the last one. The
state of the loader counts this batch, but it is not trained yet.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drawbar.lightning._compat import has_prefetched_batch, is_prefetching

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class LoaderWithoutPrefetchedBatch:
    """Training data loader whose state does not count a prefetched batch.

    Other attributes are those of the loader.

    Args:
        loader: Loader with `state_dict` and `load_state_dict`.
        trainer: Trainer that reads it.
    """

    _previous_state: object = None
    """State of the loader before it read its newest batch."""

    def __init__(self, loader: Any, trainer: Trainer) -> None:
        vars(self).update(_loader=loader, _trainer=trainer)

    @staticmethod
    def is_stateful(loader: object) -> bool:
        """Return whether a loader has a state, like a `StatefulDataLoader`."""
        return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._loader, name, value)  # Lightning resets `_iterator`

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[object]:
        vars(self)["_previous_state"] = None
        return self._read(iter(self._loader))

    def _read(self, batches: Iterator[object]) -> Iterator[object]:
        while True:
            if is_prefetching(self._trainer):
                vars(self)["_previous_state"] = copy.deepcopy(self._loader.state_dict())
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def state_dict(self) -> object:
        """Return the state after the batch that Lightning has passed to the module last."""
        previous = self._previous_state
        if previous is not None and has_prefetched_batch(self._trainer):
            return previous
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue at a state."""
        self._loader.load_state_dict(state)
