"""`make test-lowest` and `make test-latest` keep one row for each extra, versions, and Python."""

from __future__ import annotations

import tomllib

from tests.versions import REPO, SUITES, TABLE, update_table

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


def test_each_extra_has_a_suite() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    combined = {"all", "bench", "conformance", "demo", "dev", "docs"}
    needs_gpu = {"gpu"}
    extras = project["optional-dependencies"].keys() - combined - needs_gpu
    assert extras == SUITES.keys() - {"core"}


def test_classifiers_are_the_python_versions_of_the_table() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    listed = {name.removeprefix(prefix) for name in project["classifiers"] if prefix in name}
    rows = [line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert listed == {row[3].strip() for row in rows[1:]}
