"""Read and set which parts of a model are frozen, which checkpoints of Lightning do not contain.

Callbacks such as `BackboneFinetuning` freeze a model at the start of each attempt and unfreeze it
only at one epoch. After a restart in a later epoch, it would stay frozen.
"""

from __future__ import annotations

from torch import nn


def read_freezing(model: nn.Module) -> dict[str, bool]:
    """Return `requires_grad` of all parameters and `track_running_stats` of all modules.

    Lightning's callbacks set the second one for batch normalization.
    """
    return {
        **{f"{name}.requires_grad": each.requires_grad for name, each in model.named_parameters()},
        **{
            f"{name}.track_running_stats": each.track_running_stats
            for name, each in model.named_modules()
            if hasattr(each, "track_running_stats")
        },
    }


def set_freezing(model: nn.Module, values: dict[str, bool]) -> None:
    """Set values of `read_freezing`. Names that the model does not have are ignored."""
    owners = {**dict(model.named_modules()), **dict(model.named_parameters())}
    for key, value in values.items():
        name, _, attribute = key.rpartition(".")
        if name in owners:
            setattr(owners[name], attribute, value)
