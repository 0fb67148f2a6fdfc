"""Random scenarios of Accelerate: one or two loaders of a training loop, samplers, and streams."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from benchmarks._soak_restarts import Steps
from benchmarks._soak_streams import make_dataset, make_sampler, read_rows
from drawbar.accelerate import load_state, report_state
from drawbar.torch import prepare_data_loader

ACCELERATE_KINDS = (
    "shuffled",
    "sequential",
    "epoch_sampler",
    "stream",
    "epoch_stream",
    "huggingface",
    "huggingface_shuffled",
)
DRAWBAR_KINDS = (
    "shuffled",
    "weighted",
    "unsized_sampler",
    "epoch_sampler",
    "huggingface",
    "huggingface_shuffled",
)


def draw(rng: random.Random) -> dict[str, Any]:
    """Return the settings of a random scenario."""
    loaders = [_draw_loader(rng) for _ in range(rng.choice((1, 1, 2)))]
    joins = rng.choice(("zip", "cycle"))
    steps = rng.randint(1, 8) if rng.random() < 0.2 else None
    # Accelerate does not count an epoch that ends early, so call set_epoch.
    ends_early = steps is not None or (joins == "zip" and len(loaders) > 1)
    return {
        "loaders": loaders,
        "joins": joins,
        "skips": "function" if ends_early else rng.choice(("method", "function")),
        "dispatch_batches": rng.choice((None, None, True)),
        "accumulation_steps": rng.choice((1, 1, 2)),
        "epochs": rng.randint(1, 3),
        "steps": steps,
        "save_steps": rng.randint(1, 6),
        "saves_epochs": rng.random() < 0.4,
    }


def _draw_loader(rng: random.Random) -> dict[str, Any]:
    prepares = rng.choice(("accelerate", "drawbar"))
    return {
        "prepares": prepares,
        "kind": rng.choice(ACCELERATE_KINDS if prepares == "accelerate" else DRAWBAR_KINDS),
        "rows": rng.randint(4, 24),
        "batch_size": rng.randint(1, 4),
        "drop_last": rng.random() < 0.3,
        "num_workers": rng.choices((0, 1), weights=(29, 1))[0],
    }


def _make_loader(settings: dict[str, Any]) -> DataLoader[Any]:
    kind, count = settings["kind"], settings["rows"]
    return DataLoader(
        make_dataset(kind, count),
        batch_size=settings["batch_size"],
        shuffle=True if kind == "shuffled" else None,
        sampler=make_sampler(kind, count),
        drop_last=settings["drop_last"],
        num_workers=settings["num_workers"],
        generator=torch.Generator().manual_seed(7),
    )


class Source:
    """A prepared loader, and the batches of it that were consumed in its epoch.

    Args:
        accelerator: The Accelerator.
        settings: Settings of the loader.
        skip: Skips batches of a loader that Accelerate has prepared.
    """

    def __init__(
        self, accelerator: Accelerator, settings: dict[str, Any], skip: Callable[..., Any]
    ) -> None:
        self._is_own = settings["prepares"] == "accelerate"
        self._has_epoch = hasattr(loader := _make_loader(settings), "dataset") and hasattr(
            loader.dataset, "set_epoch"
        )
        self._skip = skip
        self.loader: Any = (
            accelerator.prepare(loader) if self._is_own else prepare_data_loader(loader)
        )
        self.epoch = self.num_consumed = 0

    def read(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch."""
        loader = self.loader
        if not self._is_own and self._has_epoch:
            loader.dataset.set_epoch(self.epoch)
        if self._is_own and self._skip is accelerate.skip_first_batches:
            loader.set_epoch(self.epoch)
        if self._is_own and self.num_consumed:
            if isinstance(loader, DataLoaderDispatcher) and self.num_consumed == _length(loader):
                return iter(())  # Accelerate cannot dispatch a remainder without batches
            loader = self._skip(loader, self.num_consumed)
        return self._count(iter(loader))

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.num_consumed += 1
            yield batch

    def end_epoch(self) -> None:
        """Count an epoch."""
        self.epoch, self.num_consumed = self.epoch + 1, 0

    def cycle(self) -> Iterator[Any]:
        """Yield batches of all epochs."""
        while True:
            yield from self.read()
            self.end_epoch()


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def train(settings: dict[str, Any], steps: Steps) -> object:
    """Train, and return the weights."""
    return _Loop(settings, steps).run()


class _Loop:
    def __init__(self, settings: dict[str, Any], steps: Steps) -> None:
        torch.manual_seed(0)
        # Accelerate does not know where an epoch of Drawbar's loaders ends.
        warnings.filterwarnings("ignore", r"accumulate\(\) was called outside a loop")
        self._settings = settings
        self._steps = steps
        configuration = DataLoaderConfiguration(
            use_seedable_sampler=True, dispatch_batches=settings["dispatch_batches"]
        )
        self._accelerator = Accelerator(
            cpu=True,
            dataloader_config=configuration,
            gradient_accumulation_steps=settings["accumulation_steps"],
        )
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        is_method = settings["skips"] == "method"
        skip: Any = (
            (lambda *args: self._accelerator.skip_first_batches(*args))
            if is_method
            else accelerate.skip_first_batches
        )
        self._sources = [Source(self._accelerator, each, skip) for each in settings["loaders"]]
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)

    def run(self) -> float:
        """Run all epochs."""
        saved = load_state(self._accelerator)
        begin = 0
        if saved is not None:
            begin, positions = saved["epoch"], saved["positions"]
            for source, (epoch, consumed) in zip(self._sources, positions, strict=True):
                source.epoch, source.num_consumed = epoch, consumed
        is_cycle = self._settings["joins"] == "cycle"
        cycles = [each.cycle() for each in self._sources[1:]] if is_cycle else []
        for epoch in range(begin, self._settings["epochs"]):
            first = self._sources[0]
            others = self._sources[1:]
            # No variable keeps an iterator: it would not end the epoch.
            for batches in zip(
                first.read(), *(cycles or [each.read() for each in others]), strict=False
            ):
                if first.num_consumed > (self._settings["steps"] or first.num_consumed):
                    break
                self._train(epoch, batches)
            for source in self._sources[: 1 if is_cycle else None]:
                source.end_epoch()
            if self._settings["saves_epochs"] and self._accelerator.sync_gradients:
                self._save(epoch + 1)
        return float(self._accelerator.unwrap_model(self._model).weight.item())

    def _train(self, epoch: int, batches: tuple[Any, ...]) -> None:
        self._steps.stop_if_planned()
        with self._accelerator.accumulate(self._model):
            x = torch.cat([batch["x"] for batch in batches])
            loss = self._model(x / 8).pow(2).mean()
            self._accelerator.backward(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()
        number = self._sources[0].num_consumed
        self._steps.add((epoch, number), ([read_rows(each) for each in batches], loss.item()))
        if number % self._settings["save_steps"] == 0 and self._accelerator.sync_gradients:
            self._save(epoch)

    def _save(self, epoch: int) -> None:
        positions = [(each.epoch, each.num_consumed) for each in self._sources]
        report_state(self._accelerator, {"epoch": epoch, "positions": positions})
        self._steps.save()
