"""Tests of formatted sizes."""

import pytest

from drawbar.train._storage.contents import format_exact_size, format_size


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_400, "999 kB"),
        (999_900, "1 MB"),
        (1_234_567, "1.23 MB"),
        (3_100_000_000, "3.1 GB"),
        (5 * 10**12, "5 TB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_format_size_uses_suitable_unit(nbytes: int, expected: str) -> None:
    assert format_size(nbytes) == expected


def test_format_exact_size_includes_byte_count() -> None:
    assert (format_exact_size(5), format_exact_size(90_000)) == ("5 bytes", "90 kB (90000 bytes)")
