"""What the backend configs of both libraries share: how a worker's process imports the library."""

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
    """What both libraries can be told about the workers' processes.

    Args:
        import_sklearn: Whether a worker imports scikit-learn with the library, which takes about a
            second and is what the library's estimators need (`XGBClassifier`, `LGBMClassifier`).
            Default: only where code of yours runs, as a training function, a callback or a metric.

    Raises:
        TypeError: `import_sklearn` is no bool.
    """

    library_module: ClassVar[str]
    """The module to import."""
    min_version: ClassVar[str]
    """The oldest release of it that works."""
    optional_imports: ClassVar[tuple[str, ...]] = ("sklearn",)
    """Packages that the library imports if they are there; each has an option `import_...`."""

    import_sklearn: bool | None = None

    def __post_init__(self) -> None:
        for package, value in self._imports.items():
            if value is not None and not isinstance(value, bool):
                raise TypeError(
                    f"{type(self).__name__}.import_{package} must be True, False or None, "
                    f"found {value!r}"
                )

    def check_requirements(self, scaling_config: ScalingConfig) -> None:
        """Check the library's version.

        Raises:
            ImportError: It is too old.
        """
        # As the module says: XGBoost comes in packages of several names.
        found: str = importlib.import_module(self.library_module).__version__
        require_version(
            self.library_module,
            found,
            self.min_version,
            requirement=f"drawbar[{self.library_module}]",
        )

    @property
    def _imports(self) -> dict[str, bool | None]:
        return {package: getattr(self, f"import_{package}") for package in self.optional_imports}

    def with_resolved_imports(self, *, runs_user_code: bool) -> Self:
        """Decide what the user has left open."""
        undecided = [package for package, value in self._imports.items() if value is None]
        return replace(self, **{f"import_{package}": runs_user_code for package in undecided})

    @property
    def skipped_imports(self) -> list[str]:
        """The packages that are not imported; scikit-learn would import the others itself."""
        if self.import_sklearn is not False:
            return []
        return [package for package, value in self._imports.items() if value is False]

    @property
    def process_setup_hook(self) -> Callable[[], object] | None:
        """Import the library, if that is not to be done in the usual way."""
        return (
            partial(import_without, self.skipped_imports, self.library_module)
            if self.skipped_imports
            else None
        )


def import_without(packages: Sequence[str], library: str) -> None:
    """Import a library that uses some packages if they are there, as if they were not.

    A package that this process has imported already is left to the library.
    """
    blocked = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]  # their import now fails
    try:
        importlib.import_module(library)
    finally:
        for package in blocked:
            del sys.modules[package]
