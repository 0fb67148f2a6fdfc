"""A notebook that trains on two workers, executed by nbclient in a kernel of this interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
import ray
from nbclient import NotebookClient

pytestmark = pytest.mark.usefixtures("ray_cluster")

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


def run_cells(folder: Path, *sources: str) -> list[dict[str, Any]]:
    """Run the cells of a new notebook in order and return the outputs of the last one."""
    make: Any = nbformat.v4  # it has no types
    notebook = make.new_notebook(cells=[make.new_code_cell(source) for source in sources])
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, kernel_name="python3", resources=where).execute()
    outputs: list[dict[str, Any]] = notebook.cells[-1].outputs
    return outputs


def test_notebook_cell_shows_result_of_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    outputs = run_cells(tmp_path, DEFINE, FIT)
    assert outputs[-1]["output_type"] == "execute_result"
    assert outputs[-1]["data"]["text/plain"].startswith(f"Result(\n  path='{tmp_path}/run',")
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


def test_notebook_traceback_has_cell_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    outputs = run_cells(tmp_path, "from drawbar import train", FAIL)
    (printed,) = (output["text"] for output in outputs if output.get("name") == "stdout")
    assert 'raise ValueError("wrong " + config["how"])' in printed
