"""Find violations of the documented behaviour of loaders (docs/data.md) in recorded samples.

Pure functions over recorded samples: this module knows the documentation, not the implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from benchmarks._soak_loaders import EVAL_BATCH_SIZE, eval_samples
from benchmarks._soak_run import Part, Pass
from benchmarks._soak_scenario import Scenario

FEWEST_FOR_DISTINCT_ORDERS = 12  # two permutations of so many samples are never equal by chance


@dataclass(frozen=True)
class Outcome:
    """Recorded samples of a scenario and its references.

    Attributes:
        parts: Samples that count, by attempt.
        orders: The iterations over each loader with one rank and without interruption.
        uninterrupted: Samples of an uninterrupted run; None if the world size changed.
    """

    parts: list[Part]
    orders: dict[str, list[Pass]]
    uninterrupted: Part | None


@dataclass(frozen=True)
class Epoch:
    """One iteration over a loader, which several attempts may have read.

    Attributes:
        loader: "train" or "eval".
        number: Number of the iteration.
        parts: The passes of all ranks, by attempt.
    """

    loader: str
    number: int
    parts: list[list[Pass]]

    @property
    def is_in_one_part(self) -> bool:
        """True if one attempt consumed all samples."""
        return sum(any(each.batches for each in part) for part in self.parts) <= 1


def find_violations(scenario: Scenario, outcome: Outcome) -> Iterator[str]:
    """Return a line for each violation of the documentation."""
    epochs = list(group_by_epoch(outcome.parts))
    for epoch in epochs:
        order = outcome.orders[epoch.loader][epoch.number]
        for violation in chain(
            check_order(scenario, order),
            check_split(scenario, epoch, order),
        ):
            yield f"{epoch.loader} epoch {epoch.number}: {violation}"
    yield from check_epochs_differ(scenario, outcome.orders)
    for name in outcome.orders:
        yield from check_draws(scenario, [epoch for epoch in epochs if epoch.loader == name])
    if outcome.uninterrupted is not None:
        yield from compare(scenario, epochs, list(group_by_epoch([outcome.uninterrupted])))


def group_by_epoch(parts: Sequence[Part]) -> Iterator[Epoch]:
    """Return the epochs of all loaders in the order in which they began."""
    grouped: dict[tuple[str, int], list[list[Pass]]] = {}
    for part in parts:
        for passes in zip(*part, strict=True):
            ((loader, epoch),) = {(each.loader, each.epoch) for each in passes}
            grouped.setdefault((loader, epoch), []).append(list(passes))
    for (loader, number), epoch_parts in grouped.items():
        yield Epoch(loader, number, epoch_parts)


# -- the order of an epoch


def check_order(scenario: Scenario, order: Pass) -> Iterator[str]:
    """Check that an order has the samples that the sampler yields."""
    ids = list(chain(*order.batches))
    is_train = order.loader == "train"
    wanted = range(scenario.samples if is_train else eval_samples(scenario))
    drops_batch = scenario.drop_last and scenario.sampler != "batches_unsized"
    match scenario.sampler if is_train else "shuffled":
        case "sequential":
            is_right = ids == list(wanted)
        case "weighted":
            is_right = len(ids) == len(wanted) and set(ids) <= set(wanted)
        case "endless":
            cycles = [ids[at : at + len(wanted)] for at in range(0, len(ids), len(wanted))]
            is_right = all(len(set(cycle)) == len(cycle) for cycle in cycles)
        case kind if kind.startswith("batches") and drops_batch:
            size = scenario.batch_size or 1
            is_right = len(set(ids)) == len(ids) == len(wanted) // size * size
        case _:
            is_right = sorted(ids) == list(wanted)
    if not is_right:
        yield f"one rank reads {ids}, which the sampler does not yield"


def check_epochs_differ(scenario: Scenario, orders: dict[str, list[Pass]]) -> Iterator[str]:
    """Check that each epoch of a random sampler has a different order."""
    samples = {"train": scenario.samples, "eval": eval_samples(scenario)}
    for name, passes in orders.items():
        is_random = name == "eval" or scenario.sampler != "sequential"
        if not is_random or samples[name] < FEWEST_FOR_DISTINCT_ORDERS:
            continue
        beginnings = [tuple(chain(*each.batches))[:FEWEST_FOR_DISTINCT_ORDERS] for each in passes]
        found = [ids for ids in beginnings if len(ids) == FEWEST_FOR_DISTINCT_ORDERS]
        if len(set(found)) < len(found):
            yield f"{name}: two epochs have the same order"


# -- the split between ranks and attempts


def check_split(scenario: Scenario, epoch: Epoch, order: Pass) -> Iterator[str]:
    """Check that the ranks take turns in an order, each item once but for padding."""
    is_train = epoch.loader == "train"
    takes_batches = is_train and scenario.has_batch_sampler
    drop_last = is_train and scenario.drop_last
    is_endless = is_train and scenario.sampler == "endless"
    size = 1 if takes_batches else (scenario.batch_size or 1) if is_train else EVAL_BATCH_SIZE
    wanted = list(_items(order, takes_batches))
    stream: list[Hashable] = []
    is_over, world_size = False, 1
    for part in epoch.parts:
        turns = [list(_items(each, takes_batches)) for each in part]
        if len({len(each.batches) for each in part}) > 1 or len(set(map(len, turns))) > 1:
            yield f"the ranks received different numbers of batches: {_describe(epoch)}"
            return
        if is_over and turns[0] and not drop_last:
            yield f"an attempt received batches after the end of the epoch: {_describe(epoch)}"
        if turns[0] or not stream:
            world_size = len(part)
        stream += chain.from_iterable(zip(*turns, strict=True))
        missing = len(wanted) - len(stream)
        is_over = not is_endless and (missing < len(part) * size if drop_last else missing <= 0)
        if scenario.has_length or not is_train:
            length = _length(len(wanted), len(part), size, drop_last=drop_last)
            if {each.length for each in part} != {length}:
                yield f"len(loader) is {part[0].length} instead of {length}"
    is_left_early = is_train and scenario.steps == sum(len(part[0].batches) for part in epoch.parts)
    padding = stream[len(wanted) :]
    if stream[: len(wanted)] != wanted[: len(stream)]:
        yield f"the order differs from {wanted}: {_describe(epoch)}"
    elif not is_over and not is_left_early:
        yield f"{missing} items are missing: {_describe(epoch)}"
    if len(padding) >= world_size or not set(padding) <= set(wanted) or (padding and drop_last):
        yield f"{len(padding)} items are repeated on {world_size} ranks: {_describe(epoch)}"


def _items(each: Pass, takes_batches: bool) -> Iterator[Hashable]:
    """Return the units that the ranks take turns in: batches of a batch sampler, or samples."""
    return map(tuple, each.batches) if takes_batches else chain(*each.batches)


def _length(items: int, world_size: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of batches of one rank in a complete epoch."""
    if drop_last:
        return items // world_size // batch_size
    return math.ceil(math.ceil(items / world_size) / batch_size)


def _describe(epoch: Epoch) -> str:
    return "; ".join(
        f"part {number}: {[each.batches for each in part]}"
        for number, part in enumerate(epoch.parts)
    )


# -- random numbers of worker processes


def check_draws(scenario: Scenario, epochs: Sequence[Epoch]) -> Iterator[str]:
    """Check that the processes of all ranks draw different numbers in all epochs of a loader."""
    passes = [each for epoch in epochs for part in epoch.parts for each in part]
    draws = [draw for each in passes for draw in each.draws]
    samples = sum(len(batch) for each in passes for batch in each.batches)
    if len(draws) != (samples if scenario.num_workers else 0):
        yield f"{len(draws)} samples of {samples} were loaded by a worker process"
    for name, column in zip(("torch", "numpy", "random"), zip(*draws, strict=True), strict=False):
        repeated = len(column) - len(set(column))
        if repeated:
            yield f"{repeated} of {len(column)} draws from {name} are repeated"


# -- an uninterrupted run with the same world size


def compare(
    scenario: Scenario, epochs: Sequence[Epoch], expected: Sequence[Epoch]
) -> Iterator[str]:
    """Compare a run with an uninterrupted one of the same world size."""
    found_keys = [(each.loader, each.number) for each in epochs]
    if found_keys != [(each.loader, each.number) for each in expected]:
        yield f"other epochs than in an uninterrupted run: {found_keys}"
        return
    for epoch, reference in zip(epochs, expected, strict=True):
        # PyTorch seeds persistent workers at the first iteration only.
        has_equal_draws = epoch.is_in_one_part and not scenario.persistent_workers
        name = f"{epoch.loader} epoch {epoch.number}"
        if _by_rank(epoch, _batches) != _by_rank(reference, _batches):
            yield (
                f"{name}: differs from an uninterrupted run: {_describe(epoch)}; "
                f"uninterrupted: {_describe(reference)}"
            )
        elif has_equal_draws and _by_rank(epoch, _draws) != _by_rank(reference, _draws):
            yield f"{name}: worker processes draw other numbers than in an uninterrupted run"


def _by_rank(epoch: Epoch, values: Callable[[Pass], list[list[int]]]) -> list[list[list[int]]]:
    ranks = zip(*epoch.parts, strict=True)
    return [list(chain.from_iterable(map(values, passes))) for passes in ranks]


def _batches(each: Pass) -> list[list[int]]:
    return each.batches


def _draws(each: Pass) -> list[list[int]]:
    return each.draws
