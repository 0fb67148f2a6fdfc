"""Pure decisions of data loaders: split, order, position, identity, and device of batches."""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import threading
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from drawbar import train
from drawbar.torch import enable_reproducibility, prepare_data_loader
from drawbar.torch._attempt_cleanup import attempt_cleanup
from drawbar.torch._device_transfer import iter_to_device, move_to_device
from drawbar.torch._loader_registry import LoaderIdentity, describe_dataset, match_recorded
from drawbar.torch._order_stream import OrderRandom, PrefixChecksum
from drawbar.torch._reproducibility import derive_seed
from drawbar.torch._sampler import EpochPosition, EpochSampler
from drawbar.train import RunConfig
from drawbar.train.testing import run_in_threads
from tests.torch.test_data_position import Ids
from tests.torch.test_loaders_per_epoch import CountingStream
from tests.torch.test_unsized_samplers import Endless, Unsized


def samplers(source: Any, world_size: int, **options: Any) -> list[EpochSampler[Any]]:
    options = {"seed": 7, "world_size": world_size, **options}
    return [EpochSampler(source, rank=rank, **options) for rank in range(world_size)]


def test_epoch_sampler_assigns_items_round_robin() -> None:
    one, two = (list(sampler) for sampler in samplers("abcdef", 2))
    assert one == ["a", "c", "e"]
    assert two == ["b", "d", "f"]


@pytest.mark.parametrize("items", [0, 1, 3, 8, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_epoch_sampler_shares_are_equal_and_complete(items: int, world_size: int) -> None:
    shares = [list(sampler) for sampler in samplers(range(items), world_size)]
    assert len({len(each) for each in shares}) == 1
    assert {item for each in shares for item in each} == set(range(items))
    assert sum(map(len, shares)) - items < world_size


def test_epoch_sampler_with_drop_last_repeats_nothing() -> None:
    shares = [list(sampler) for sampler in samplers(range(10), 3, drop_last=True)]
    assert sorted(item for each in shares for item in each) == list(range(9))


def test_epoch_sampler_order_differs_by_epoch() -> None:
    ranks = samplers(RandomSampler(range(12)), 3)
    epochs = [[list(each) for each in ranks] for _ in range(3)]
    for epoch in epochs:
        assert sorted(item for each in epoch for item in each) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_epoch_sampler_order_is_independent_of_world_size() -> None:
    (alone,) = samplers(RandomSampler(range(12)), 1)
    together = [list(each) for each in samplers(RandomSampler(range(12)), 3)]
    assert list(alone) == [item for turn in zip(*together, strict=True) for item in turn]


def test_epoch_sampler_set_epoch_sets_order() -> None:
    first, second = samplers(RandomSampler(range(12)), 1) + samplers(RandomSampler(range(12)), 1)
    epochs = [list(first) for _ in range(3)]
    second.set_epoch(2)
    assert list(second) == epochs[2]
    assert list(second) == list(first)


def test_epoch_sampler_order_differs_by_seed() -> None:
    (one,) = samplers(RandomSampler(range(12)), 1, seed=1)
    (two,) = samplers(RandomSampler(range(12)), 1, seed=2)
    assert list(one) != list(two)


def test_epoch_sampler_does_not_change_generators() -> None:
    generator = torch.Generator()
    generator.manual_seed(3)
    (sampler,) = samplers(RandomSampler(range(12), generator=generator), 1)
    states = [generator.get_state(), torch.get_rng_state()]
    python_state = random.getstate()
    list(sampler)
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == python_state


class PythonShuffle(Sampler[int]):
    """A custom sampler that draws from Python's own generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(10), 10))

    def __len__(self) -> int:
        return 10


def test_epoch_sampler_splits_custom_sampler() -> None:
    one, two = (list(each) for each in samplers(PythonShuffle(), 2))
    assert sorted(one + two) == list(range(10))


def test_epoch_sampler_keeps_weights_of_weighted_sampler() -> None:
    weights = [0.0] * 5 + [1.0] * 5
    one, two = (list(each) for each in samplers(WeightedRandomSampler(weights, 40), 2))
    assert len(one) == len(two) == 20
    assert set(one + two) == set(range(5, 10))


def test_epoch_sampler_splits_batch_sampler_by_batches() -> None:
    batches = BatchSampler(RandomSampler(range(10)), 3, drop_last=False)
    one, two = (list(each) for each in samplers(batches, 2))
    assert len(one) == len(two) == len(samplers(batches, 2)[0]) == 2
    assert {item for batch in one + two for item in batch} == set(range(10))
    assert samplers(batches, 2)[0].batch_size == 3


class RecordsEpochs(RandomSampler):
    """A sampler that is called with the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epochs = [*getattr(self, "epochs", []), epoch]


def test_epoch_sampler_sets_epoch_of_inner_sampler() -> None:
    inner = RecordsEpochs(range(12))
    (sampler,) = samplers(BatchSampler(inner, 3, drop_last=False), 1)
    sampler.set_epoch(4)
    list(sampler)
    list(sampler)
    assert inner.epochs == [4, 5]


# -- samplers without a length


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [0, 1, 3, 8, 10, 200])
def test_epoch_sampler_without_length_splits_like_one_with_length(
    items: int, world_size: int, drop_last: bool
) -> None:
    sized = samplers(range(items), world_size, drop_last=drop_last)
    unsized = samplers(Unsized(range(items)), world_size, drop_last=drop_last)
    for _ in range(2):
        assert [list(rank) for rank in unsized] == [list(rank) for rank in sized]


@pytest.mark.parametrize("items", [5, 8, 200])
def test_epoch_sampler_without_length_resumes_on_other_world_size(items: int) -> None:
    for consumed in range(items + 1):
        (first,) = samplers(Unsized(RandomSampler(range(items))), 1)
        order = list(first)
        rest = samplers(Unsized(RandomSampler(range(items))), 3)
        for sampler in rest:
            sampler.resume_from(first.position_after(consumed))
        turns = list(chain(*zip(*(list(sampler) for sampler in rest), strict=True)))
        assert turns == (order[consumed:] + order)[: len(turns)]
        assert 0 <= len(turns) - (items - consumed) < 3


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_endless_sampler_is_not_disturbed_by_draws_of_the_training_loop(kind: str) -> None:
    one, two = (iter(sampler) for sampler in samplers(Endless(kind), 2))
    undisturbed = list(islice(iter(samplers(Endless(kind), 1)[0]), 400))
    turns = []
    for _ in range(200):
        turns += [next(one), next(two)]
        random.random(), np.random.rand(), torch.rand(())
    assert turns == undisturbed


def test_endless_sampler_restores_the_global_generators() -> None:
    states = torch.get_rng_state(), random.getstate()
    next(iter(samplers(Endless("torch"), 2)[0]))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_epoch_sampler_of_batches_over_unsized_sampler_does_not_read_to_the_end() -> None:
    (sampler,) = samplers(BatchSampler(Endless("python"), 4, False), 1)
    assert [len(batch) for batch in islice(sampler, 100)] == [4] * 100
    with pytest.raises(TypeError, match="BatchSampler has no length"):
        len(sampler)


@pytest.mark.parametrize("source", [iter(range(3)), (item for item in range(3)), count()])
def test_epoch_sampler_of_one_time_iterator_raises(source: Any) -> None:
    with pytest.raises(TypeError, match="can be read only once"):
        EpochSampler(source, rank=0, world_size=1, seed=0)


def test_epoch_sampler_resumed_with_other_order_warns_and_starts_the_epoch_again() -> None:
    (first,) = samplers(Unsized(range(100)), 1)
    list(first)
    (second,) = samplers(Unsized([*range(50), *range(99, 49, -1)]), 1)
    for consumed, rest in ((40, 60), (60, 100)):
        second.resume_from(first.position_after(consumed))
        if rest == 60:
            assert len(list(second)) == rest
        else:
            with pytest.warns(UserWarning, match="after 60 items, because it now has fewer items"):
                assert len(list(second)) == rest


def test_prefix_checksum_differs_after_a_changed_item_and_needs_little_memory() -> None:
    one, two = PrefixChecksum(), PrefixChecksum()
    one.update(range(10**5))
    two.update([*range(1024), -1, *range(1025, 10**5)])
    assert one.at(1024) == two.at(1024)
    assert one.at(1025) != two.at(1025)
    assert one.at(10**5) != two.at(10**5)
    assert len(one._counts) < 500


def test_unsized_batch_sampler_with_reproducibility_pads_the_last_turn(
    run_config: RunConfig,
) -> None:
    class Threes:
        def __iter__(self) -> Iterator[list[int]]:
            yield from ([0, 1, 2], [3, 4, 5], [6, 7, 8])

    def function() -> list[list[int]]:
        if train.get_context().get_world_rank() == 0:  # the seed belongs to the process
            enable_reproducibility(1)
        return list(
            prepare_data_loader(DataLoader(Ids(9), batch_sampler=Threes(), collate_fn=list))
        )

    with attempt_cleanup():  # the seed and the deterministic algorithms end with the test
        ranks = run_in_threads(function, num_workers=2, run_config=run_config).return_values
    assert ranks == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [0, 1, 2]]]


# -- positions


def resumed_samplers(
    world_size: int, position: EpochPosition, **options: Any
) -> list[EpochSampler[int]]:
    """Return the samplers of all ranks, resumed from a position."""
    ranks = [
        EpochSampler(RandomSampler(range(60)), rank=rank, world_size=world_size, seed=0, **options)
        for rank in range(world_size)
    ]
    for each in ranks:
        each.resume_from(position)
    return ranks


def position_after(items: int) -> tuple[EpochPosition, list[int]]:
    """A position in epoch 4, through JSON, and the whole order of that epoch."""
    (sampler,) = resumed_samplers(1, EpochPosition(seed=2**64 - 1, epoch=4))
    order = list(sampler)
    recorded = json.loads(json.dumps(asdict(sampler.current_position.advance(items))))
    return EpochPosition(**recorded), order


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("consumed", [0, 1, 24, 59, 60])
def test_epoch_sampler_resume_on_any_world_size_splits_remainder(
    world_size: int, consumed: int
) -> None:
    position, order = position_after(consumed)
    shares = [list(each) for each in resumed_samplers(world_size, position)]
    turns = [item for turn in zip(*shares, strict=True) for item in turn]
    padding = len(turns) - (60 - consumed)
    assert turns == (order[consumed:] + order)[: len(turns)]
    assert 0 <= padding < world_size


def test_epoch_sampler_resume_with_drop_last_repeats_nothing() -> None:
    position, order = position_after(25)
    shares = [list(each) for each in resumed_samplers(3, position, drop_last=True)]
    assert sorted(chain(*shares)) == sorted(order[25:58])


def test_epoch_position_advance_stops_at_end_of_epoch() -> None:
    position, _ = position_after(61)
    assert position.consumed == 60


@pytest.mark.parametrize(("epoch", "left"), [(4, 36), (5, 60), (0, 60)])
def test_set_epoch_resumes_only_recorded_epoch(epoch: int, left: int) -> None:
    (sampler,) = resumed_samplers(1, position_after(24)[0])
    sampler.set_epoch(epoch)
    assert [len(list(sampler)) for _ in range(2)] == [left, 60]
    assert sampler.next_position == EpochPosition(seed=2**64 - 1, epoch=epoch + 2)


def test_derive_seed_of_different_parts_differs() -> None:
    seeds = {derive_seed(seed, epoch) for seed in range(20) for epoch in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)


# -- identities

A = LoaderIdentity("a", "Ids[12]")
B = LoaderIdentity("b", "Ids[12]")
LATER = LoaderIdentity("a", "Ids[12]", 1)
LONGER = LoaderIdentity("a", "Ids[13]")


def recorded(*identities: LoaderIdentity, consumed: int = 4) -> dict[str, Any]:
    return {
        f"number:{number}": {"loader": vars(identity), "state": {"consumed": consumed}}
        for number, identity in enumerate(identities, 1)
    }


@pytest.mark.parametrize(
    ("positions", "prepared", "expected"),
    [
        ((), {A}, None),
        ((A,), {A}, 1),
        ((LONGER, LATER, A), {A}, 3),
        ((LATER,), {A}, 1),
        ((LATER,), {A, LATER}, None),  # it belongs to another loader of this attempt
        ((B,), {A}, 1),  # the program was edited
        ((B,), {A, B}, None),
        ((LONGER,), {A}, 1),  # the dataset has changed
        ((LONGER,), {A, LONGER}, None),
        ((LoaderIdentity("b", "Ids[13]"),), {A}, None),
    ],
)
def test_match_recorded_prefers_the_most_similar_position(
    positions: Any, prepared: Any, expected: int | None
) -> None:
    key = match_recorded(A, 1, recorded(*positions), prepared)
    assert key == (None if expected is None else f"number:{expected}")


def test_match_recorded_of_edited_program_uses_the_number() -> None:
    positions = recorded(B, LoaderIdentity("c", "Ids[12]"))
    assert match_recorded(A, 2, positions, {A}) == "number:2"


def test_match_recorded_of_ambiguous_positions_raises() -> None:
    positions = recorded(LATER, LoaderIdentity("a", "Ids[12]", 2))
    with pytest.raises(ValueError, match=r"2 positions .* loader of Ids\[12\]. Pass .*name="):
        match_recorded(A, 1, positions, {A})


def test_match_recorded_of_ambiguous_positions_between_epochs_uses_the_first() -> None:
    positions = recorded(LATER, LoaderIdentity("a", "Ids[12]", 2), consumed=0)
    assert match_recorded(A, 3, positions, {A}) == "number:1"


def test_describe_dataset_has_type_and_length() -> None:
    assert describe_dataset(Ids(12)) == "Ids[12]"
    assert describe_dataset(CountingStream()) == "CountingStream"


# -- devices

META = torch.device("meta")


class Pair(NamedTuple):
    x: torch.Tensor
    y: str


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


class Encoding(UserDict[str, torch.Tensor]):
    """Moves in place and gives nothing back."""

    def to(self, device: torch.device) -> None:
        self.data = {key: value.to(device) for key, value in self.data.items()}


@pytest.mark.parametrize(
    ("batch", "tensor"),
    [
        ((torch.ones(1), "label"), lambda moved: moved[0]),
        ([torch.ones(1)], lambda moved: moved[0]),
        ({"a": {"b": torch.ones(1)}}, lambda moved: moved["a"]["b"]),
        (OrderedDict(a=torch.ones(1)), lambda moved: moved["a"]),
        (Pair(torch.ones(1), "label"), lambda moved: moved.x),
        (Sample(torch.ones(1), "label"), lambda moved: moved.x),
        (Encoding(a=torch.ones(1)), lambda moved: moved["a"]),
        (
            torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, 1, 1), torch.tensor([2])),
            lambda moved: moved.data,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_move_to_device_moves_tensors_in_structures(batch: Any, tensor: Any) -> None:
    there = move_to_device(batch, META)
    assert type(there) is type(batch)
    assert tensor(there).device == META


def test_move_to_device_keeps_other_values() -> None:
    batch = {"a": ["text", 1, None], "b": range(3)}
    assert move_to_device(batch, META) == batch


def test_iter_to_device_moves_all_batches_including_none() -> None:
    batches = list(iter_to_device([torch.ones(1), None, torch.ones(1)], META, prefetch=True))
    assert batches[1] is None
    assert batches[0].device == batches[2].device == META


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prefetched_opaque_batches_survive_memory_reuse() -> None:
    class Opaque:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def to(self, device: torch.device) -> Opaque:
            return Opaque(self.x.to(device, non_blocking=True))

    device = torch.device("cuda", 0)
    large = torch.ones(4096, 4096, device=device)
    batches = [Opaque(torch.full((1 << 20,), float(i)).pin_memory()) for i in range(50)]
    sums = []
    for batch in iter_to_device(batches, device, prefetch=True):
        large @ large  # keeps the GPU busy for about a millisecond
        sums.append(batch.x.mean())
    assert torch.stack(sums).tolist() == [float(i) for i in range(50)]


def test_interrupted_drawing_restores_random_state_of_the_process() -> None:
    class Interrupted(BaseException):
        pass

    def draw(order: OrderRandom, has_begun: threading.Event) -> None:
        with contextlib.suppress(Interrupted):
            while True:
                with order.drawing():
                    torch.rand(3)
                    has_begun.set()

    torch.manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(200):  # each interrupt comes at another line
        has_begun = threading.Event()
        thread = threading.Thread(target=draw, args=[OrderRandom([1, 2, 3], 7), has_begun])
        thread.start()
        has_begun.wait()
        while thread.is_alive():  # Python drops an exception that is raised in a destructor
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted)
            )
            thread.join(1)
        assert torch.equal(torch.get_rng_state(), before)
