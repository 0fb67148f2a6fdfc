"""Words of messages for users."""


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 report" or "2 reports"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
