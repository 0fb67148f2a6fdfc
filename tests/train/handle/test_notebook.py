"""A notebook whose cells train on workers, executed by nbclient in a kernel of this interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
import ray
from nbclient import NotebookClient

DEFINE = """
from drawbar import train

def train_func(config):
    print("from rank", train.get_context().get_world_rank())
    for step in range(config["steps"]):
        train.report({"step": step})
"""

FIT = """
train.DataParallelTrainer(
    train_func,
    train_loop_config={"steps": 3},
    scaling_config=train.ScalingConfig(num_workers=2),
    run_config=train.RunConfig(name="run", storage_path="."),
).fit()
"""

FAIL = """
def fails(config):
    raise ValueError("wrong " + config["how"])

try:
    train.DataParallelTrainer(
        fails,
        train_loop_config={"how": "on purpose"},
        run_config=train.RunConfig(name="fails", storage_path="."),
    ).fit()
except train.WorkerGroupError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def notebook(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Folder of a notebook that has run, and the outputs of each of its cells."""
    folder = tmp_path_factory.mktemp("notebook")
    make: Any = nbformat.v4  # it has no types
    cells = [make.new_code_cell(source) for source in (DEFINE, FIT, FAIL)]
    where = {"metadata": {"path": str(folder)}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        notebook = make.new_notebook(cells=cells)
        NotebookClient(notebook, kernel_name="python3", resources=where).execute()
    return folder, [cell.outputs for cell in notebook.cells]


def test_notebook_cell_shows_result_of_two_workers(notebook: tuple[Path, list[Any]]) -> None:
    folder, (_, outputs, _) = notebook
    assert outputs[-1]["output_type"] == "execute_result"
    assert outputs[-1]["data"]["text/plain"].startswith(f"Result(\n  path='{folder}/run',")
    card = outputs[-1]["data"]["text/html"]
    assert "<b>run</b> finished" in card
    assert "reports 0 to 2</title>" in card
    printed = [output["text"] for output in outputs if output.get("name") == "stdout"]
    assert printed == ["from rank 0\n"]
    live = [
        output["data"]["text/plain"]
        for output in outputs
        if output["output_type"] == "display_data"
    ]
    assert len(live) == 1
    assert "finished | report 2: step 2" in live[0]


def test_notebook_traceback_has_cell_lines(notebook: tuple[Path, list[Any]]) -> None:
    _, (*_, outputs) = notebook
    (printed,) = (output["text"] for output in outputs if output.get("name") == "stdout")
    assert 'raise ValueError("wrong " + config["how"])' in printed
