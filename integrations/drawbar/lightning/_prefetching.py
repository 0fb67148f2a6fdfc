"""Save the position of a training data loader without the batch that Lightning has prefetched.

If Lightning does not know the number of batches, it reads one batch ahead to find the last one. The
position and the state of the loader count this batch, but it is not trained yet.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drawbar.lightning._compat import has_prefetched_batch, is_prefetching
from drawbar.train.backend import attempt_local, register_read_ahead

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def make_loader_without_prefetched_batch(loader: Any, trainer: Trainer) -> Any:
    """Return a training data loader that resumes at the batch that Lightning has prefetched.

    Args:
        loader: Any iterable. It is returned unchanged if its length is known and it has no state.
        trainer: Trainer that reads it.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulLoaderWithoutPrefetchedBatch(loader, trainer)
    try:
        len(loader)
    except (TypeError, NotImplementedError):  # Lightning catches the same errors
        return LoaderWithoutPrefetchedBatch(loader, trainer)
    return loader


class _OpenLoaders:
    """Loaders of an attempt that Lightning reads one batch ahead."""

    def __init__(self) -> None:
        self.loaders = weakref.WeakSet[LoaderWithoutPrefetchedBatch]()
        self.get_positions = register_read_ahead(self.get_previous_positions)

    def get_previous_positions(self) -> dict[str, object]:
        """Return the positions of their data sources without the prefetched batch."""
        positions: dict[str, object] = {}
        for loader in self.loaders:
            positions |= loader.get_previous_positions()
        return positions


class LoaderWithoutPrefetchedBatch:
    """Training data loader with positions of data sources that do not count a prefetched batch.

    Other attributes are those of the loader.

    Args:
        loader: The loader.
        trainer: Trainer that reads it.
    """

    _previous_positions: dict[str, object]
    """Positions of data sources before the loader read its newest batch."""

    def __init__(self, loader: Any, trainer: Trainer) -> None:
        vars(self).update(_loader=loader, _trainer=trainer, _previous_positions={})
        attempt_local(_OpenLoaders).loaders.add(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._loader, name, value)  # Lightning resets `_iterator`

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[object]:
        vars(self)["_previous_positions"] = {}
        return self._read(iter(self._loader))

    def _read(self, batches: Iterator[object]) -> Iterator[object]:
        get_positions = attempt_local(_OpenLoaders).get_positions
        while True:
            vars(self)["_previous_positions"] = {}
            before = None
            if is_prefetching(self._trainer):
                before = get_positions()
                self.before_prefetch()
            try:
                batch = next(batches)
            except StopIteration:
                return
            if before is not None:
                # Only of the sources of this batch: a validation may read others before the report.
                vars(self)["_previous_positions"] = {
                    name: before.get(name)
                    for name, position in get_positions().items()
                    if position != before.get(name)
                }
            yield batch

    def get_previous_positions(self) -> dict[str, object]:
        """Return the positions before the prefetched batch; empty without one."""
        return self._previous_positions if has_prefetched_batch(self._trainer) else {}

    def before_prefetch(self) -> None:
        """Prepare for a batch that Lightning prefetches."""


class StatefulLoaderWithoutPrefetchedBatch(LoaderWithoutPrefetchedBatch):
    """Loader with `state_dict` and `load_state_dict`, which Lightning saves and restores."""

    _previous_state: object = None
    """State of the loader before it read its newest batch."""

    def __iter__(self) -> Iterator[object]:
        vars(self)["_previous_state"] = None
        return super().__iter__()

    def before_prefetch(self) -> None:
        """Keep the state."""
        vars(self)["_previous_state"] = copy.deepcopy(self._loader.state_dict())

    def state_dict(self) -> object:
        """Return the state after the batch that Lightning has passed to the module last."""
        previous = self._previous_state
        if previous is not None and has_prefetched_batch(self._trainer):
            return previous
        return self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue at a state."""
        self._loader.load_state_dict(state)
