"""The blocks of Python in the README and the docs run, in the order of their page.

A block stands in what the page before it has made, and in what its reader has: `GIVEN`. One whose
title says so runs inside a training function. One that needs GPUs or a cluster says that in its
title, and is only compiled.
"""

from __future__ import annotations

import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from drawbar.train._launch import opening

REPO = Path(__file__).parents[1]
IN_THE_FUNCTION = "In the training function"
ELSEWHERE = ("On GPUs", "On a cluster")

GIVEN = {
    "README.md": """
        make_model = lambda: torch.nn.Linear(2, 1)
        train_one_epoch = lambda model: model(torch.ones(1, 2)).sum().item()
        """,
    "docs/index.md": "loss = 0.5",
    "docs/accelerate.md": """
        from accelerate import Accelerator
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from drawbar import train
        from drawbar.accelerate import load_state, report_state
        from drawbar.torch import prepare_data_loader
        metrics = {"loss": 0.5}
        class Kept:
            def save_state(self, path): open(f"{path}/state", "w").close()
        accelerator = Kept()
        """,
    "docs/checkpoints.md": """
        import torch
        from drawbar import train
        from drawbar.torch import TorchTrainer
        rank, metrics, loss, model = 0, {"loss": 0.5}, 0.5, torch.nn.Linear(2, 1)
        """,
    "docs/data.md": """
        import pandas, ray.data, torch
        from drawbar import train
        from drawbar.torch import prepare_data_loader, prepare_model
        from drawbar.train import DataParallelTrainer, ScalingConfig
        path, frame = "data.parquet", pandas.DataFrame({"x": range(4)})
        pandas.DataFrame({"x": range(8)}).to_parquet(path)
        """,
    "docs/failures.md": """
        from drawbar import train
        step, load, save_and_report = 20, dict, dict
        """,
    "docs/lightning.md": "Model = DataModule = None",
    "docs/output.md": "from drawbar import train; log = print",
    "docs/runs.md": """
        from drawbar import train
        def loop():
            while not train.checkpoint_requested():
                train.report({"loss": 0.5})
            with train.checkpoint_dir() as path:
                (path / "state").touch()
                train.report({"loss": 0.5}, checkpoint=path)
        trainer = train.DataParallelTrainer(
            loop, scaling_config=train.ScalingConfig(num_workers=2)
        )
        """,
    "docs/testing.md": """
        from drawbar import train
        def train_func():
            train.report({"loss": 0.05})
        """,
    "docs/torch.md": "",
}
"""By page: what its blocks use and do not make, as a reader has a model and data."""

OTHER_TESTS = {
    "docs/cli.md": "tests/cli",
    "docs/jax.md": "tests/jax",
    "docs/keras.md": "tests/keras",
    "docs/lightgbm.md": "tests/lightgbm",
    "docs/quickstart.md": "tests/test_examples.py",
    "docs/tensorflow.md": "tests/tensorflow",
    "docs/transformers.md": "tests/transformers",
    "docs/tune.md": "tests/tune",
    "docs/writing-an-integration.md": "tests/train/test_writing_an_integration.py",
    "docs/xgboost.md": "tests/xgboost",
}
"""Pages that show a part of what these run in full: their blocks are compiled here."""


class Block(NamedTuple):
    """A block of a page: the line that it begins at, its title and its code."""

    line: int
    title: str
    code: str


def blocks_of(page: str) -> Iterator[Block]:
    text = (REPO / page).read_text()
    found = re.finditer(
        r"^( *)```python *(?:title=\"([^\"\n]*)\")?\n(.*?)^\1```", text, re.M | re.S
    )
    for match in found:
        line = text.count("\n", 0, match.start(3))
        yield Block(line, match[2] or "", "\n" * line + textwrap.dedent(match[3]))


PAGES = sorted(
    page
    for page in ["README.md", *(str(p.relative_to(REPO)) for p in (REPO / "docs").rglob("*.md"))]
    if any(blocks_of(page))
)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_compile_and_are_run(page: str) -> None:
    for block in blocks_of(page):
        compile(block.code, page, "exec")
    assert (page in GIVEN) != (page in OTHER_TESTS)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of frameworks
@pytest.mark.parametrize("page", GIVEN)
def test_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(opening, "DEFAULT_STORAGE_PATH", str(tmp_path / "runs"))
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        exec(textwrap.dedent(GIVEN[page]), vars(module))
        for block in blocks_of(page):
            if block.title not in ELSEWHERE:
                run(compile(block.code, page, "exec"), block, module, tmp_path)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def run(code: Any, block: Block, module: types.ModuleType, folder: Path) -> None:
    if block.title == IN_THE_FUNCTION:

        def function() -> None:
            with train.checkpoint_dir() as path:
                exec(code, {"path": path, **vars(module)})

        DataParallelTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name=f"line_{block.line}", storage_path=folder),
        ).fit()
        return
    before = set(vars(module))
    exec(code, vars(module))
    for name in set(vars(module)) - before:
        if name.startswith("test_"):
            vars(module)[name](folder)
