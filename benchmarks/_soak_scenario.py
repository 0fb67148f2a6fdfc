"""Random scenarios of the soak test, as plain values that a seed reproduces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

SamplerKind = Literal[
    "shuffled",
    "sequential",
    "weighted",
    "custom",
    "custom_with_epoch",
    "custom_unsized",
    "endless",
    "batches",
    "batches_with_epoch",
    "batches_of_sampler_with_epoch",
    "batches_unsized",
    "batches_of_unsized",
]
SetEpoch = Literal["sampler", "batch_sampler"]
Randomness = Literal["torch", "numpy", "python", "generator"]

WEIGHTS: dict[SamplerKind, int] = {
    "shuffled": 5,
    "sequential": 2,
    "weighted": 2,
    "custom": 2,
    "custom_with_epoch": 1,
    "custom_unsized": 3,
    "endless": 2,
    "batches": 2,
    "batches_with_epoch": 2,
    "batches_of_sampler_with_epoch": 1,
    "batches_unsized": 3,
    "batches_of_unsized": 1,
}
MAX_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a run.

    A tick is a batch that the training function has processed, or the end of a loop over a loader.

    Attributes:
        world_size: Number of ranks.
        checkpoints: Ticks of this attempt after which all ranks report a checkpoint.
        stop: The tick after which the attempt fails; None to run to the end.
        new_fit: Another `fit()` resumes the run. Otherwise, the `fit()` of the previous attempt
            restarts it.
    """

    world_size: int
    checkpoints: tuple[int, ...] = ()
    stop: int | None = None
    new_fit: bool = True


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training function's loaders, and the interruptions of its run.

    Attributes:
        seed: Seed of PyTorch, or of the loader's generator.
        sampler: Sampler of the training loader.
        randomness: Source of random numbers of a custom sampler.
        samples: Size of the dataset.
        batch_size: Batch size; None for a loader that yields single samples.
        drop_last: Value of the loader, or of its batch sampler.
        has_generator: Whether the loaders are created with `generator=`.
        has_new_seed: Whether attempts that resume from a checkpoint start with another seed.
        num_workers: Worker processes of each loader.
        persistent_workers: Value of the loaders.
        evaluation: When the function iterates an evaluation loader: after each epoch, or after
            the second batch of each epoch.
        is_per_epoch: Whether the function creates its loaders in each epoch.
        is_named: Whether the loaders have names.
        set_epoch: Attribute of the prepared loader on which the function calls `set_epoch`.
        epochs: Number of epochs.
        steps: Number of batches after which the function leaves an epoch with `break`.
        is_on_ray: Whether the ranks are Ray workers that die by SIGKILL, instead of threads.
        attempts: The attempts in order.
    """

    seed: int = 0
    sampler: SamplerKind = "shuffled"
    randomness: Randomness = "torch"
    samples: int = 20
    batch_size: int | None = 3
    drop_last: bool = False
    has_generator: bool = False
    has_new_seed: bool = False
    num_workers: int = 0
    persistent_workers: bool = False
    evaluation: Literal["after_epoch", "in_epoch"] | None = None
    is_per_epoch: bool = False
    is_named: bool = False
    set_epoch: SetEpoch | None = None
    epochs: int = 2
    steps: int | None = None
    is_on_ray: bool = False
    attempts: tuple[Attempt, ...] = (Attempt(world_size=2),)

    @property
    def has_batch_sampler(self) -> bool:
        """True if the training loader has a custom batch sampler."""
        return self.sampler.startswith("batches")

    @property
    def has_length(self) -> bool:
        """True if the training loader has a length."""
        return self.sampler != "endless" and not self.sampler.endswith("unsized")

    def __str__(self) -> str:
        """Return the fields that differ from their defaults."""
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Scenario({', '.join(changed)})"

    def fits(self) -> list[list[Attempt]]:
        """Return the attempts of each `fit()`."""
        fits: list[list[Attempt]] = []
        for attempt in self.attempts:
            if attempt.new_fit or not fits:
                fits.append([])
            fits[-1].append(attempt)
        return fits


def draw_scenario(seed: int, number: int, *, is_on_ray: bool = False) -> Scenario:
    """Draw a scenario; equal arguments return equal scenarios.

    Args:
        seed: Seed of the soak test.
        number: Number of the scenario.
        is_on_ray: Whether the scenario runs on Ray workers.
    """
    rng = random.Random(f"{seed}/{number}")
    (sampler,) = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
    samples = rng.choice([rng.randint(1, 8), rng.randint(9, 60)])
    has_batches = sampler.startswith("batches") or rng.random() < 0.95
    batch_size = rng.randint(1, 6) if has_batches else None
    num_workers = rng.choices([0, 1, 2], weights=[2, 1, 1] if is_on_ray else [18, 1, 1])[0]
    # A process that is forked while the thread of another rank holds a lock may hang.
    max_world_size = 3 if is_on_ray else 1 if num_workers else 4
    evaluation = rng.choices([None, "after_epoch", "in_epoch"], weights=[5, 2, 2])[0]
    epochs = rng.randint(2, 4)
    has_steps = sampler == "endless" or rng.random() < 0.15
    steps = rng.randint(1, 8) if has_steps else None
    per_epoch = steps or samples // (batch_size or 1)
    return Scenario(
        seed=rng.randrange(2**32),
        sampler=sampler,
        randomness=rng.choice(("torch", "numpy", "python", "generator")),
        samples=samples,
        batch_size=batch_size,
        drop_last=has_batches and rng.random() < 0.4,
        has_generator=rng.random() < 0.25,
        # The seed of the loader's processes is the one of the current attempt, not of the
        # checkpoint.
        has_new_seed=num_workers == 0 and rng.random() < 0.3,
        num_workers=num_workers,
        persistent_workers=num_workers > 0 and rng.random() < 0.5,
        evaluation=evaluation,  # type: ignore[arg-type]  # random.choices widens literals
        is_per_epoch=rng.random() < 0.25,
        is_named=rng.random() < 0.4,
        set_epoch=_draw_set_epoch(rng, sampler),
        epochs=epochs,
        steps=steps,
        is_on_ray=is_on_ray,
        attempts=tuple(_draw_attempts(rng, epochs * (per_epoch + 2), max_world_size)),
    )


def _draw_set_epoch(rng: random.Random, sampler: SamplerKind) -> SetEpoch | None:
    if rng.random() < 0.7:
        return None
    return rng.choice(("sampler", "batch_sampler")) if sampler.startswith("batches") else "sampler"


def _draw_attempts(
    rng: random.Random, total_batches: int, max_world_size: int
) -> Iterator[Attempt]:
    """Draw attempts that read about `total_batches` batches together."""
    changes_world_size = rng.random() < 0.6
    world_size = rng.randint(1, max_world_size)
    count = rng.randint(2, MAX_ATTEMPTS)
    for number in range(count):
        new_fit = number == 0 or rng.random() < 0.4
        if new_fit and changes_world_size:
            world_size = rng.randint(1, max_world_size)
        stop = None
        if number < count - 1:
            stop = rng.randint(1, max(1, 2 * total_batches // (world_size * count)))
        newest = stop or max(1, total_batches // world_size)
        checkpoints = {rng.randint(1, newest) for _ in range(rng.randint(0, 3))}
        if rng.random() < 0.3:
            checkpoints.add(newest)
        yield Attempt(
            world_size=world_size,
            checkpoints=tuple(sorted(checkpoints)),
            stop=stop,
            new_fit=new_fit,
        )
