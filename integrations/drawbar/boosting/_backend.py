"""What the backends of both libraries share: how a worker's process imports the library."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from drawbar.train.backend import Backend, BackendConfig, WorkerGroupView


@dataclass(frozen=True, kw_only=True)
class BoostingConfig(BackendConfig):
    """What both libraries can be told about the workers' processes.

    Args:
        import_sklearn: Whether a worker imports scikit-learn with the library, which takes about a
            second and is what the library's estimators need (`XGBClassifier`, `LGBMClassifier`).
            Default: only where code of yours runs, as a training function, a callback or a metric.

    Raises:
        TypeError: `import_sklearn` is no bool.
    """

    library: ClassVar[str]
    """The module to import."""

    import_sklearn: bool | None = None

    def __post_init__(self) -> None:
        if self.import_sklearn is not None and not isinstance(self.import_sklearn, bool):
            raise TypeError(
                f"{type(self).__name__}.import_sklearn must be True, False or None, "
                f"found {self.import_sklearn!r}"
            )


class BoostingBackend(Backend):
    """Imports the library; its processes can run one attempt after another."""

    reentrant = True

    def on_start(self, worker_group: WorkerGroupView, backend_config: Any) -> None:
        """Import the library on every worker, if that is not to be done in the usual way."""
        if backend_config.import_sklearn is False:
            worker_group.execute(import_without_sklearn, backend_config.library)


def import_without_sklearn(library: str) -> None:
    """Import a library that uses scikit-learn if it is there, as if it were not.

    Nothing happens in a process that has imported either of them.
    """
    if "sklearn" in sys.modules:
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # its import now fails
    try:
        importlib.import_module(library)
    finally:
        del sys.modules["sklearn"]
