"""Format byte counts for messages."""

from __future__ import annotations


def format_size(nbytes: int) -> str:
    """Return a size with a suitable unit, such as "1.23 GB"."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:  # larger values are rounded to 1000 of this unit
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def format_exact_size(nbytes: int) -> str:
    """Return a size with a suitable unit and the exact number of bytes."""
    return f"{nbytes} bytes" if nbytes < 1000 else f"{format_size(nbytes)} ({nbytes} bytes)"
