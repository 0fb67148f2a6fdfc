"""Modules that are known to survive a fork, for automatic preloading.

For each of these packages, a test compares workers that were forked with fresh workers.
"""

from __future__ import annotations

from collections.abc import Iterable

FRAMEWORKS = frozenset(
    {
        "accelerate",
        "lightgbm",
        "lightning",
        "pandas",
        "pytorch_lightning",
        "sklearn",
        "torch",
        "transformers",
        "xgboost",
    }
)
"""Packages with a slow import, for which the ranks of a script are forked."""

DEPENDENCIES = frozenset(
    {
        *("asyncio", "drawbar", "jsonschema", "msgspec", "numpy", "pyarrow", "pydantic"),
        *("requests", "scipy", "yaml"),
    },
)
"""Packages that every worker or a framework imports, which need not be imported again either."""

PRELOADABLE_PACKAGES = FRAMEWORKS | DEPENDENCIES


def select_preloadable(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that a fork server may import, in their order.

    Args:
        modules: Names of the imported modules of a process, as in `sys.modules`.

    Returns:
        Packages and their direct submodules, whose import imports deeper ones.
    """
    return tuple(
        name
        for name in modules
        if name.count(".") <= 1 and name.partition(".")[0] in PRELOADABLE_PACKAGES
    )
