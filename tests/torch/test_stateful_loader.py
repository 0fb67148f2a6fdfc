"""`StatefulDataLoader` of torchdata: a restart repeats and skips no sample."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from drawbar.torch import prepare_data_loader
from drawbar.train import RunConfig, TrainingFailedError
from drawbar.train.testing import run_in_threads
from tests.torch.test_data_position import SAMPLES, Ids, everything, interrupted

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # in torchdata


class Stream(IterableDataset[int]):
    """Numbers, split between the worker processes of the loader; it has no state."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(start, SAMPLES, step))


class StatefulStream(Stream):
    """Numbers of an iterator that has a state, and therefore does not draw earlier ones again."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.next, SAMPLES):
            self.next = number + 1
            yield number
        self.next = 0

    def state_dict(self) -> dict[str, object]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def make_loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    if options.get("num_workers"):
        options["multiprocessing_context"] = "fork"
    loader: DataLoader[Any] = StatefulDataLoader(dataset, 10, collate_fn=list, **options)
    return loader


@pytest.mark.parametrize(("num_workers", "ranks"), [(0, (2, 4)), (2, (1, 1))])
def test_stateful_loader_of_map_style_dataset_resumes_on_any_number_of_ranks(
    run_config: RunConfig, num_workers: int, ranks: tuple[int, int]
) -> None:
    loader = partial(make_loader, Ids(), shuffle=True, num_workers=num_workers)
    assert everything(interrupted(loader, run_config, *ranks)) == list(range(SAMPLES))


@pytest.mark.parametrize(("dataset", "num_workers"), [(Stream, 2), (StatefulStream, 0)])
def test_stateful_loader_of_iterable_dataset_resumes_with_its_state(
    run_config: RunConfig, dataset: type[Stream], num_workers: int
) -> None:
    def loader() -> DataLoader[Any]:
        return make_loader(dataset(), num_workers=num_workers)

    assert everything(interrupted(loader, run_config, 1, 1)) == list(range(SAMPLES))


@pytest.mark.parametrize("is_loaded_before", [True, False])
def test_stateful_loader_rejects_second_position(
    run_config: RunConfig, is_loaded_before: bool
) -> None:
    def function() -> None:
        loader: Any = make_loader(Ids())
        next(iter(loader))
        state = loader.state_dict()
        if is_loaded_before:
            loader.load_state_dict(state)
        prepared: Any = prepare_data_loader(loader)
        prepared.load_state_dict(state)

    with pytest.raises(TrainingFailedError, match="would skip the same samples again"):
        run_in_threads(function, num_workers=1, run_config=run_config)
