"""Update modules that were imported before the variables of their rank were set.

`program_server.py` imports this file by path; it uses only the standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

# Modules whose function `rank_zero_only` has an attribute `rank`, and the variable with its value.
_RANK_ATTRIBUTES = {
    "lightning_utilities.core.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}


def set_rank(environment: Mapping[str, str]) -> None:
    """Set the values that imported modules would have read from the variables of the rank."""
    for name, variable in _RANK_ATTRIBUTES.items():
        function = getattr(sys.modules.get(name), "rank_zero_only", None)
        if function is not None and hasattr(function, "rank"):
            function.rank = int(environment[variable])
