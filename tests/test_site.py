"""Tests of the documentation site: navigation, links, gallery of examples, and notebooks."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import ray
import yaml
from nbclient import NotebookClient

REPO = Path(__file__).parents[1]
DOCS = REPO / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s#]*)#?([^)\s]*)\)")
PRIVATE = re.compile(r"/(tmp|root|work|mnt)/|pid \d")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Loader that ignores Python names, which select a renderer of MkDocs."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)


def navigation() -> Iterator[str]:
    """Yield the pages in the navigation of the site."""

    def walk(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            for value in node.values():
                yield from walk(value)
        elif isinstance(node, list):
            for value in node:
                yield from walk(value)

    config = yaml.load((REPO / "mkdocs.yml").read_text(), _Loader)
    return walk(config["nav"])


def text_of(page: Path) -> str:
    """Return the Markdown of a page or notebook without its code blocks."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", text_of(page), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", t).strip().lower()) for t in titles}


def test_site_navigation_has_every_page() -> None:
    pages = {str(p.relative_to(DOCS)) for p in [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]}
    assert sorted(navigation()) == sorted(pages)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.stem)
def test_site_links_lead_to_existing_pages_and_headings(page: Path) -> None:
    broken = []
    for path, anchor in LINK.findall(text_of(page)):
        target = (page.parent / path) if path else page
        if not target.exists():
            broken.append(path)
        elif anchor and target.suffix == ".md" and "reference" not in target.parts:
            broken += [f"{path}#{anchor}"] if anchor not in anchors_of(target) else []
    assert broken == []


def test_site_gallery_has_every_example_with_its_output() -> None:
    sections = re.split(r"^## ", (DOCS / "examples.md").read_text(), flags=re.M)[1:]
    shown = {}
    for section in sections:
        for source in re.findall(r'^ *--8<-- "(.*)"$', section, re.M):
            shown[source] = "\n```text\n" in section
    examples = {str(path.relative_to(REPO)) for path in (REPO / "examples").rglob("*.py")}
    assert shown == dict.fromkeys(examples, True)


def test_site_benchmarks_match_the_readme() -> None:
    def rows(page: str) -> list[str]:
        text = (REPO / page).read_text()
        return re.findall(r"^\| (?:start|same|restart|later|`report).*$", text, re.M)

    assert rows("docs/benchmarks.md") == rows("README.md")
    assert len(rows("README.md")) > 1


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_site_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(shutil.copy(path, tmp_path), as_version=4)  # type: ignore[no-untyped-call]
    stored = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in stored)  # the site shows the stored outputs
    assert not PRIVATE.search(json.dumps([cell.outputs for cell in stored]))
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, kernel_name="python3", resources=where).execute()
