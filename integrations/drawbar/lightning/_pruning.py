"""Read and set the masks of pruned parameters, which checkpoints of Lightning do not contain.

`ModelPruning` saves a pruned parameter as zeros without its mask. After a restart, it would be
trained again.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import prune


def read_masks(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the mask of each parameter that `torch.nn.utils.prune` has pruned."""
    return {
        f"{path}.{key}".lstrip(".").removesuffix("_mask"): mask
        for path, module in model.named_modules()
        for key, mask in module.named_buffers(recurse=False)
        if key.endswith("_mask") and hasattr(module, key.removesuffix("_mask") + "_orig")
    }


def set_masks(model: nn.Module, masks: dict[str, torch.Tensor]) -> None:
    """Prune parameters by masks of `read_masks`. Names that the model does not have are ignored."""
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        if name in parameters:
            path, _, key = name.rpartition(".")
            mask = mask.to(parameters[name].device)
            prune.custom_from_mask(model.get_submodule(path), key, mask)  # type: ignore[no-untyped-call]
