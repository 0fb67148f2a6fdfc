"""Data loaders that are prepared once per epoch: orders, positions, and their identity."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from drawbar import train
from drawbar.torch import prepare_data_loader
from drawbar.train import RunConfig, TrainingFailedError
from drawbar.train.testing import run_in_threads
from tests.torch.test_data_position import Ids, die, restarted
from tests.train.rank_data_probe import save, saved


class Recorder:
    """Received batches; saves and ends the first attempt at one place."""

    def __init__(self, is_place: Callable[[int, str, int], bool]) -> None:
        before = saved()
        self.history: Any = before[0]["history"] if before else []
        self.start = before[0]["epoch"] if before else 0
        self.phase = before[0]["phase"] if before else "train"
        self._is_first = not before
        self._is_place = is_place

    def receive(self, epoch: int, phase: str, step: int, batch: list[int]) -> None:
        self.history.append([epoch, phase, batch])
        if self._is_first and self._is_place(epoch, phase, step):
            save(history=self.history, epoch=epoch, phase=phase, step=step + 1)
            die()


def make_loader(samples: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Ids(samples), 2, shuffle=True, collate_fn=list, **options)


def train_only(is_place: Any, **options: Any) -> Callable[[], Any]:
    def function() -> Any:
        recorder = Recorder(is_place)
        for epoch in range(recorder.start, 3):
            loader = prepare_data_loader(make_loader(12), **options)
            for step, batch in enumerate(loader):
                recorder.receive(epoch, "train", step, batch)
        return recorder.history

    return function


def train_named(is_place: Any) -> Callable[[], Any]:
    return train_only(is_place, name="train")


def train_collected(is_place: Any) -> Callable[[], Any]:
    """No loader is alive after its epoch."""

    def function() -> Any:
        recorder = Recorder(is_place)
        for epoch in range(recorder.start, 3):
            for step, batch in enumerate(prepare_data_loader(make_loader(12))):
                recorder.receive(epoch, "train", step, batch)
            gc.collect()
        return recorder.history

    return function


def train_all_alive(is_place: Any) -> Callable[[], Any]:
    def function() -> Any:
        recorder, loaders = Recorder(is_place), []
        for epoch in range(recorder.start, 3):
            loaders.append(prepare_data_loader(make_loader(12)))
            for step, batch in enumerate(loaders[-1]):
                recorder.receive(epoch, "train", step, batch)
        return recorder.history

    return function


def train_and_evaluate(is_place: Any) -> Callable[[], Any]:
    """The two loaders of an epoch are prepared by the same line."""

    def function() -> Any:
        recorder = Recorder(is_place)
        for epoch in range(recorder.start, 3):
            for phase, samples in (("train", 12), ("evaluate", 8)):
                if epoch == recorder.start and (phase, recorder.phase) == ("train", "evaluate"):
                    continue
                for step, batch in enumerate(prepare_data_loader(make_loader(samples))):
                    recorder.receive(epoch, phase, step, batch)
        return recorder.history

    return function


def prepared_once(is_place: Any) -> Callable[[], Any]:
    """Both loaders are prepared by the same line and have equally long datasets."""

    def function() -> Any:
        recorder = Recorder(is_place)
        loaders = {phase: prepare_data_loader(make_loader(12)) for phase in ("train", "evaluate")}
        for epoch in range(recorder.start, 3):
            for phase, loader in loaders.items():
                if epoch == recorder.start and (phase, recorder.phase) == ("train", "evaluate"):
                    continue
                for step, batch in enumerate(loader):
                    recorder.receive(epoch, phase, step, batch)
        return recorder.history

    return function


def rarely_evaluated(is_place: Any) -> Callable[[], Any]:
    """The second loader is prepared in each epoch, and used in the last one only."""

    def function() -> Any:
        recorder = Recorder(is_place)
        for epoch in range(recorder.start, 3):
            training = prepare_data_loader(make_loader(12))
            evaluation = prepare_data_loader(make_loader(12))
            if epoch != recorder.start or recorder.phase == "train":
                for step, batch in enumerate(training):
                    recorder.receive(epoch, "train", step, batch)
            if epoch == 2:
                for step, batch in enumerate(evaluation):
                    recorder.receive(epoch, "evaluate", step, batch)
        return recorder.history

    return function


def evaluated_inside_epochs(is_place: Any) -> Callable[[], Any]:
    """A resumed attempt does not use the first evaluation loader that it prepares."""

    def function() -> Any:
        recorder = Recorder(is_place)
        steps = 0 if not saved() else saved()[0]["step"]
        for epoch in range(recorder.start, 3):
            training = prepare_data_loader(make_loader(12))
            evaluation = prepare_data_loader(make_loader(8))
            for step, batch in enumerate(training, start=steps):
                if step == 1:
                    for evaluated in evaluation:
                        recorder.history.append([epoch, "evaluate", evaluated])
                recorder.receive(epoch, "train", step, batch)
            steps = 0
        return recorder.history

    return function


PLACES = [(0, "train", 0), (1, "train", 2), (1, "train", 5), (2, "train", 3)]
EVALUATING = [train_and_evaluate, prepared_once, rarely_evaluated]
PROGRAMS = [
    train_only,
    train_named,
    train_collected,
    train_all_alive,
    evaluated_inside_epochs,
    *EVALUATING,
]
CASES = [(program, place) for program in PROGRAMS for place in PLACES]
CASES += [(program, (2, "evaluate", 1)) for program in EVALUATING]
PARAMETERS = [
    # Each step of this program collects garbage, which takes long.
    pytest.param(*case, marks=pytest.mark.nightly)
    if case[0] is train_collected and case[1] != PLACES[1]
    else case
    for case in CASES
]


@pytest.mark.parametrize(("program", "place"), PARAMETERS)
def test_loader_prepared_per_epoch_resumes_like_an_uninterrupted_run(
    run_config: RunConfig, program: Any, place: tuple[int, str, int]
) -> None:
    whole = RunConfig(name="whole", storage_path=run_config.storage_path)
    expected = restarted(program(lambda *_: False), whole)
    resumed = restarted(program(lambda *now: now == place), run_config)
    assert resumed == expected
    orders = set()
    for epoch in range(3):
        batches = [batch for now, phase, batch in resumed if (now, phase) == (epoch, "train")]
        assert sorted(chain(*batches)) == list(range(12))
        orders.add(str(batches))
    assert len(orders) == 3


@pytest.mark.parametrize("workers", [(2, 3), (3, 1)])
def test_loader_prepared_per_epoch_resumes_on_other_world_size(
    run_config: RunConfig, workers: tuple[int, int]
) -> None:
    def function() -> list[list[int]]:
        before = saved()
        received = [sample for rank in before for sample in rank["received"]]
        start, now = (before[0]["epoch"] if before else 0), list[int]()
        epochs = []
        for epoch in range(start, 2):
            now = []
            for step, batch in enumerate(prepare_data_loader(make_loader(48))):
                now += batch
                if (epoch, step) == (1, 2) and not before:
                    save(epoch=epoch, received=now)
                    die()
            epochs.append(now)
        return [received, *epochs]

    with pytest.raises(TrainingFailedError, match="killed"):
        run_in_threads(function, num_workers=workers[0], run_config=run_config)
    ranks = run_in_threads(function, num_workers=workers[1], run_config=run_config).return_values
    samples = [*ranks[0][0], *chain(*(rank[1] for rank in ranks))]
    assert sorted(samples) == list(range(48))


def test_loader_prepared_per_epoch_without_position_has_new_orders(run_config: RunConfig) -> None:
    def function() -> list[list[list[int]]]:
        return [list(prepare_data_loader(make_loader(12), resume=False)) for _ in range(3)]

    orders = run_in_threads(function, num_workers=1, run_config=run_config).return_value
    assert len({str(order) for order in orders}) == 3


def test_set_epoch_before_the_first_iteration_resumes_only_the_recorded_epoch(
    run_config: RunConfig,
) -> None:
    def function() -> list[int]:
        lengths = []
        for epoch in (1, 2) if saved() else (1,):
            loader = prepare_data_loader(make_loader(12))
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for step, _ in enumerate(loader, 1):
                if step == 4 and not saved():
                    save()
                    die()
            lengths.append(step)
        return lengths

    assert restarted(function, run_config) == [2, 6]


class CountingStream(IterableDataset[int]):
    """Numbers from 0 to 9, with a state."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 10:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def test_stateful_dataset_prepared_per_epoch_resumes(run_config: RunConfig) -> None:
    def function() -> Any:
        recorder = Recorder(lambda *now: now == (1, "train", 1))
        for epoch in range(recorder.start, 3):
            loader = prepare_data_loader(DataLoader(CountingStream(), 2, collate_fn=list))
            for step, batch in enumerate(loader):
                recorder.receive(epoch, "train", step, batch)
        return recorder.history

    history = restarted(function, run_config)
    assert [list(chain(*(b for e, _, b in history if e == epoch))) for epoch in range(3)] == [
        list(range(10))
    ] * 3


def test_loader_of_edited_program_resumes_with_a_warning(run_config: RunConfig) -> None:
    def function() -> int:
        if train.get_context().get_attempt() == 0:
            for _ in prepare_data_loader(make_loader(12)):
                save()
                die()
        return len(list(prepare_data_loader(make_loader(12))))

    with pytest.warns(UserWarning, match=r"another prepare_data_loader\(\) call") as warned:
        assert restarted(function, run_config) == 5
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]
