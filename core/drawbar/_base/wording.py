"""Texts of messages for users."""

from __future__ import annotations

from collections.abc import Collection


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 report" or "2 reports"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def format_ranks(ranks: Collection[int]) -> str:
    """Return "rank 3", or "ranks 0, 2 (2)"."""
    first, *others = sorted(ranks)
    if not others:
        return f"rank {first}"
    shown = ", ".join(map(str, [first, *others[:7]]))
    last = f" ... {others[-1]}" if len(others) > 7 else ""
    return f"ranks {shown}{last} ({len(ranks)})"


def escape_surrogates(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode. File names may contain them."""
    return text.encode(errors="backslashreplace").decode()


def is_encodable(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8. Lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def format_size(nbytes: int) -> str:
    """Return a size with a suitable unit, such as "1.23 GB"."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:  # larger values are rounded to 1000 of this unit
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"
