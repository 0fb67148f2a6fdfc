"""`make test-lowest` and `make test-latest` keep one row for each extra, versions, and Python."""

from __future__ import annotations

from tests.versions import REPO, SUITES, update_table

PAGE = """# Compatibility

| extra | versions | Python | passed |
|---|---|---|---|
| torch | lowest | 3.11 | 1 |
"""


def test_update_table_replaces_row_of_same_versions_and_sorts() -> None:
    page = update_table(PAGE, "| torch | lowest | 3.13 | 2 |")
    page = update_table(page, "| jax | lowest | 3.11 | 3 |")
    page = update_table(page, "| torch | lowest | 3.11 | 4 |")
    assert page.splitlines()[4:] == [
        "| jax | lowest | 3.11 | 3 |",
        "| torch | lowest | 3.11 | 4 |",
        "| torch | lowest | 3.13 | 2 |",
    ]


def test_suites_exist() -> None:
    missing = [
        path
        for suite in SUITES.values()
        for path in suite.tests.split()
        if not (REPO / "tests" / path).exists()
    ]
    assert missing == []
