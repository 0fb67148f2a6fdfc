"""BoostingConfig: which optional packages a worker imports with the library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

from drawbar.train import ScalingConfig
from drawbar.train.backend import BackendConfig, require_version


@dataclass(frozen=True, kw_only=True)
class BoostingConfig(BackendConfig):
    """Configure the worker processes of a boosting library.

    Args:
        import_sklearn: Whether a worker imports scikit-learn with the library, which takes about a
            second. The library's estimators (`XGBClassifier`, `LGBMClassifier`) need it. Default:
            only if user code runs on workers, such as a training function, a callback, or a metric.

    Raises:
        TypeError: `import_sklearn` is not a bool.
    """

    library_module: ClassVar[str]
    """Name of the module to import."""
    min_version: ClassVar[str]
    """Minimum supported version of the library."""
    optional_imports: ClassVar[tuple[str, ...]] = ("sklearn",)
    """Optional dependencies of the library. Each has an option `import_...`."""

    import_sklearn: bool | None = None

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check the library's version.

        Raises:
            ImportError: The library is not installed or too old.
        """
        # Ask the module, because XGBoost is distributed in packages with several names.
        version: str = importlib.import_module(self.library_module).__version__
        require_version(self.library_module, version, self.min_version)

    @property
    def _imports(self) -> dict[str, bool | None]:
        return {package: getattr(self, f"import_{package}") for package in self.optional_imports}

    def with_resolved_imports(self, *, runs_user_code: bool) -> Self:
        """Return a copy in which options that are None are set to `runs_user_code`."""
        undecided = [package for package, value in self._imports.items() if value is None]
        return replace(self, **{f"import_{package}": runs_user_code for package in undecided})

    @property
    def skipped_imports(self) -> list[str]:
        """Packages that are not imported; empty if scikit-learn, which imports them, is."""
        if self.import_sklearn is not False:
            return []
        return [package for package, value in self._imports.items() if value is False]

    @property
    def process_setup_hook(self) -> Callable[[], object] | None:
        """Function that imports the library without the skipped packages, if there are any."""
        return (
            partial(import_without, self.skipped_imports, self.library_module)
            if self.skipped_imports
            else None
        )


def import_without(packages: Sequence[str], library: str) -> None:
    """Import a library while some of its optional dependencies are hidden.

    Packages that are already imported in this process stay visible.
    """
    blocked = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]  # None blocks the import
    try:
        importlib.import_module(library)
    finally:
        for package in blocked:
            del sys.modules[package]
