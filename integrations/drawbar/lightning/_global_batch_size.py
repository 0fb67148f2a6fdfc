"""GlobalBatchSize: keep the global batch size with any number of workers."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch.utils.data import BatchSampler, DistributedSampler

from drawbar.lightning._bases import Callback
from drawbar.lightning._package import LateBoundBase
from drawbar.torch.integration import check_epoch_size
from drawbar.train import get_context

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class GlobalBatchSize(LateBoundBase, Callback, base="callbacks.Callback"):
    """Set `accumulate_grad_batches` so that the global batch size does not change.

    The Trainer accumulates `global_batch_size` divided by `batch_size` and by the number of
    workers. So each optimizer step uses the same samples with any number of workers, also in an
    elastic run and after a restart with another number. It replaces the Trainer's
    `accumulate_grad_batches`.

    Args:
        global_batch_size: Number of samples per optimizer step, of all workers together.
        batch_size: Batch size of the training `DataLoader`, per worker.

    Raises:
        ValueError: An argument is not a positive integer. When `fit` starts: `global_batch_size`
            is not a multiple of `batch_size` times the number of workers; or the training data is
            not one `DataLoader` with this batch size and Lightning's default samplers; or the
            number of its samples is not a multiple of `global_batch_size` and `drop_last` is not
            set; or the module uses manual optimization.

    Example:
        ```python
        trainer = L.Trainer(
            strategy=drawbar.lightning.RayDDPStrategy(),
            callbacks=[drawbar.lightning.GlobalBatchSize(48, batch_size=4)],
        )
        ```
    """

    def __init__(self, global_batch_size: int, batch_size: int) -> None:
        for name, value in (("global_batch_size", global_batch_size), ("batch_size", batch_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, found {value!r}.")
        self.global_batch_size = global_batch_size
        self.batch_size = batch_size
        self.accumulation_steps = 1
        self.saved_accumulation_steps: int | None = None
        """Accumulated batches when the loaded checkpoint was saved."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set `accumulate_grad_batches` when `fit` starts."""
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "GlobalBatchSize needs automatic optimization. With manual optimization, call "
                "drawbar.train.get_context().accumulation_steps() in the module."
            )
        self.accumulation_steps = get_context().accumulation_steps(
            self.global_batch_size, self.batch_size
        )
        trainer.accumulate_grad_batches = self.accumulation_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there is one training loader, whose steps are complete."""
        loader: Any = trainer.train_dataloader
        batches = getattr(loader, "batch_sampler", None)
        if getattr(batches, "multiple", None) != self.accumulation_steps:
            _raise_unsupported(loader)

    def check_loader(self, loader: object) -> None:
        """Check a training loader. The strategy calls it when `fit` creates the loader.

        Args:
            loader: The loader, with the sampler that Lightning has added.

        Raises:
            ValueError: The loader has another batch size, a custom sampler, or an incomplete step.
        """
        batches = getattr(loader, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None)
        if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
            _raise_unsupported(loader)
        if batches.batch_size != self.batch_size:
            raise ValueError(
                f"The training DataLoader has batch_size={batches.batch_size}, but the callback is "
                f"GlobalBatchSize({self.global_batch_size}, batch_size={self.batch_size}). Set the "
                "same batch_size."
            )
        num_samples = len(cast("Sized", sampler.dataset))
        check_epoch_size(num_samples, self.global_batch_size, drop_last=batches.drop_last)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of accumulated batches, which a resumed run compares."""
        return {"accumulation_steps": self.accumulation_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the number of accumulated batches of a checkpoint."""
        self.saved_accumulation_steps = state_dict["accumulation_steps"]


def find_global_batch_size(trainer: Trainer) -> GlobalBatchSize | None:
    """Return the callback of a Trainer, or None.

    Args:
        trainer: The Trainer.
    """
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    return next((each for each in callbacks if isinstance(each, GlobalBatchSize)), None)


def _raise_unsupported(loader: object) -> NoReturn:
    raise ValueError(
        f"GlobalBatchSize needs one training DataLoader with batch_size= and with or without "
        f"shuffle=True, found {type(loader).__name__}. Pass one DataLoader without a custom "
        "sampler, use a strategy of drawbar.lightning, and do not set "
        "Trainer(use_distributed_sampler=False)."
    )
