"""`StatefulDataLoader` of torchdata."""

from __future__ import annotations

import sys

from torch.utils.data import DataLoader


def is_stateful_loader(loader: DataLoader[object]) -> bool:
    """Return whether a loader is a `StatefulDataLoader` whose iteration is not overridden.

    Args:
        loader: The loader.

    Returns:
        True if it is; False also if torchdata is not imported.

    Example:
        >>> is_stateful_loader(StatefulDataLoader(dataset))
        True
    """
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and type(loader).__iter__ is module.StatefulDataLoader.__iter__


def reject_state(loader: DataLoader[object]) -> None:
    """Let a `StatefulDataLoader` raise an error if it would resume in addition to Drawbar.

    The samples before the position would be skipped twice.

    Raises:
        RuntimeError: The loader has already loaded a state.
    """

    def load_state_dict(state: dict[str, object]) -> None:
        if state:
            raise RuntimeError(
                "prepare_data_loader() restores the position of this StatefulDataLoader after a "
                "restart, and load_state_dict() would skip the same samples again. Remove "
                "load_state_dict(), or set prepare_data_loader(resume=False)."
            )

    load_state_dict(getattr(loader, "next_iter_state", None) or {})
    vars(loader)["load_state_dict"] = load_state_dict
