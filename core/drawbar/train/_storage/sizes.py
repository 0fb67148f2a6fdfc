"""Numbers of bytes as people read them."""

from __future__ import annotations


def format_size(nbytes: int) -> str:
    """Give a number of bytes in the unit that suits it, such as "1.23 GB"."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:  # which is written as 1000 of the unit
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def format_exact_size(nbytes: int) -> str:
    """Give a number of bytes as people read it, and exactly."""
    return f"{nbytes} bytes" if nbytes < 1000 else f"{format_size(nbytes)} ({nbytes} bytes)"
