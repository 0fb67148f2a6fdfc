"""`LoggingConfig`: console output of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any

from drawbar.train._config import fields


def _check_log_level(name: str, value: Any) -> str:
    level: str = fields.require_type(name, value, str)
    fields.require_choice(name, level.upper(), ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
    return level


@dataclass(frozen=True, repr=False)
class LoggingConfig(fields.ConfigRepr):
    """Console output of a run. The files in `<run>/logs` always contain everything.

    Args:
        log_level: "INFO" shows progress, the output of rank 0, and all errors. "WARNING" omits
            progress. "ERROR" also omits the output of rank 0.

    Raises:
        TypeError: `log_level` is not a string.
        ValueError: `log_level` is not the name of a level of `logging`.

    Example:
        >>> RunConfig(logging_config=LoggingConfig("WARNING"))
        RunConfig(logging_config=LoggingConfig(log_level='WARNING'))
    """

    log_level: Annotated[str, _check_log_level] = "INFO"

    @property
    def level_number(self) -> int:
        """Numeric level, as in `logging`."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]
