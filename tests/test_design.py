"""The design page and the contributing guide name only files and tests that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=REPO,
    capture_output=True,
    text=True,
    check=True,
).stdout.split()
ABSENT = {"drawbar/__init__.py"}  # named by the contributing guide, which forbids it

POLLING = {
    "_recovery/node_watcher.py",
    "_controller/diagnosis.py",
    "_modes/host_actor.py",
    "_runs/run_output.py",
    "_storage/journal_file.py",
    "_storage/retries.py",
    "_process/output.py",
    "_process/sentinel.py",
    "_data/cluster_cpus.py",
    "_process/exit_status.py",
}
"""Files of the core and its features with a loop that sleeps. The design page lists the reasons."""

NOT_POLLING = {
    "_controller/controller.py",  # the delay before a start
    "_recovery/time_limit.py",  # the time until the limit
    "_worker_group/actor_pool.py",  # the delay before a fork server
    "_process/training_thread.py",  # yields to another thread once
}


@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_design_pages_name_only_existing_files(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (REPO / page).read_text(), flags=re.M | re.S)
    named = set(re.findall(r"`([\w./-]+\.(?:py|md|toml))`", text)) - ABSENT
    paths = [f"/{path}" for path in FILES]
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in paths)]
    assert missing == []


def test_design_page_begins_with_at_most_25_files_of_the_kernel() -> None:
    first = re.split(r"^## ", (REPO / "docs/design.md").read_text(), flags=re.M)[1]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", first, re.M)
    assert 15 <= len(files) <= 25
    roots = [REPO / "core/drawbar/train", REPO / "core/drawbar"]
    assert [file for file in files if not any((root / file).exists() for root in roots)] == []


def test_design_invariants_name_existing_tests() -> None:
    page = (REPO / "docs/design.md").read_text()
    invariants = page.split("## Invariants")[1].split("\n## ")[0]
    sources = [(REPO / path).read_text() for path in FILES if re.search(r"/test_\w+\.py$", path)]
    defined = set(re.findall(r"^ *def (test_\w+)\(", "\n".join(sources), re.M))
    for number, text in enumerate(re.split(r"^\d+\. ", invariants, flags=re.M)[1:], 1):
        tests = re.findall(r"`(test_\w+)`", text.split("Tests: ")[-1])
        assert tests, f"invariant {number} names no test"
        assert set(tests) <= defined, f"invariant {number} names tests that do not exist"


def test_design_core_polls_only_where_documented() -> None:
    roots = [REPO / "core/drawbar", *(REPO / "integrations/drawbar").glob("_*")]
    pattern = re.compile(r"\bsleep\(|\.wait\(_?(?:LOG_)?POLL")
    found = {
        str(path.relative_to(root.parent if root.name != "drawbar" else root)).removeprefix(
            "train/"
        )
        for root in roots
        for path in root.rglob("*.py")
        if pattern.search(path.read_text())
    }
    assert found - NOT_POLLING == POLLING


def test_example_of_contributing_guide_is_in_the_code() -> None:
    guide = (REPO / "CONTRIBUTING.md").read_text()
    (diff,) = re.findall(r"^```diff\n(.*?)^```", guide, re.M | re.S)
    sections = re.findall(r"^--- (\S+)\n((?:\+.*\n)+)", diff, re.M)
    assert len(sections) == 5
    for path, added in sections:
        code = (REPO / path).read_text().splitlines()
        missing = [line[1:] for line in added.splitlines() if line[1:] not in code]
        assert missing == [], f"lines of the example that {path} does not have"


def test_table_cells_of_contributing_guide_are_short() -> None:
    lines = (REPO / "CONTRIBUTING.md").read_text().splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if len(cell.split()) >= 30] == []
