"""Tests that run the Python blocks of the README and the docs in the order of their page.

The packages that a page imports must be installed by its installation line.

A block sees the variables of the previous blocks of its page, and those in `GIVEN`. The title of a
block selects whether it runs in a training function. Blocks that need GPUs or a cluster, according
to their titles, are only compiled.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import pytest
import ray
from packaging.requirements import Requirement

from drawbar import train
from drawbar.lightning import set_lightning_package
from drawbar.torch import TorchTrainer
from drawbar.train import RunConfig, ScalingConfig

REPO = Path(__file__).parents[1]
IN_THE_FUNCTION = "In the training function"
ELSEWHERE = ("On GPUs", "On a cluster")

CLICKS = """
    import os, pandas, ray.data
    folder = os.path.abspath("data")
    frame = pandas.DataFrame({"x": range(200), "target": [x % 7 > 2 for x in range(200)]})
    for part in ("train", "valid"):
        os.makedirs(f"{folder}/{part}")
        frame.to_parquet(f"{folder}/{part}/0.parquet")
    dataset = ray.data.from_pandas(frame[["x"]])
    """

GIVEN = {
    "docs/accelerate.md": """
        from accelerate import Accelerator, DataLoaderConfiguration
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        from drawbar import train
        from drawbar.accelerate import load_state, report_state, set_global_batch_size
        from drawbar.torch import prepare_data_loader
        metrics = {"loss": 0.5}
        rows, model = torch.ones(48, 1), torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        class Kept:
            def save_state(self, path): open(f"{path}/state", "w").close()
        accelerator = Kept()
        """,
    "docs/coming-from/xgboost-ray.md": CLICKS,
    "docs/checkpoints.md": """
        def make_model():
            import torch
            return torch.nn.Linear(2, 1)
        train_one_epoch = evaluate = lambda model, *rest: 0.5
        def load(checkpoint):
            return make_model()
        rank, metrics = 0, {"loss": 0.5}
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
        import torch
        model, steps, num_epochs = torch.nn.Linear(1, 1), 2, 1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compute_loss = torch.nn.functional.mse_loss
        loader = [(torch.ones(2, 1), torch.ones(2, 1))] * 3
        """,
    "docs/jax.md": """
        import jax
        def make_state(rows):
            return {"sum": jax.device_put(jax.numpy.zeros(8), rows)}
        def batch_of(process, step):
            return jax.numpy.ones(8)
        @jax.jit
        def update(state, batch):
            return {"sum": state["sum"] + batch}, batch.sum()
        """,
    "docs/keras.md": """
        import numpy as np
        x = y = np.linspace(0, 1, 128).reshape(-1, 1)
        def make_model():
            import keras
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            return model
        """,
    "docs/fault-tolerance.md": "",
    "docs/lightgbm.md": CLICKS,
    "docs/lightning.md": "Model = DataModule = None",
    "docs/output.md": "from drawbar import train; log = print; batches = []",
    "docs/runs.md": """
        from drawbar import train
        def loop():
            while not train.should_checkpoint():
                train.report({"loss": 0.5})
            with train.checkpoint_dir() as path:
                (path / "state").touch()
                train.report({"loss": 0.5}, checkpoint=path)
        trainer = train.DataParallelTrainer(
            loop, scaling_config=train.ScalingConfig(num_workers=2)
        )
        """,
    "docs/tensorflow.md": """
        import numpy, ray.data
        dataset = ray.data.from_items([{"x": numpy.ones(1, "float32"), "y": 1.0}] * 64)
        """,
    "docs/testing.md": """
        from drawbar import train
        def train_func():
            train.report({"loss": 0.05})
        """,
    "docs/torch.md": "",
    "docs/transformers.md": """
        import ray.data
        def make_model():
            from transformers import GPT2Config, GPT2LMHeadModel
            sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 1}
            return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
        rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8
        train_dataset = eval_dataset = ray.data.from_items(rows)
        """,
    "docs/xgboost.md": CLICKS,
}
"""Code by page that defines what its blocks use, such as a model and data."""

FEW_ROUNDS = {"num_boost_round=500": "num_boost_round=3", "num_workers=2": "num_workers=1"}
SMALLER = {
    "docs/coming-from/xgboost-ray.md": FEW_ROUNDS,
    "docs/fault-tolerance.md": {"num_workers=4": "num_workers=2"},
    "docs/jax.md": {"num_workers=4": "num_workers=0", '"steps": 1000': '"steps": 200'},
    "docs/keras.md": {
        "num_workers=4": "num_workers=0",
        '"jax"': '"tensorflow"',  # what other tests have in this process
        "epochs=10": "epochs=2",
    },
    "docs/lightgbm.md": FEW_ROUNDS,
    "docs/tensorflow.md": {"num_workers=4": "num_workers=1", '"epochs": 5': '"epochs": 2'},
    "docs/transformers.md": {"num_workers=4, use_gpu=True": "num_workers=0"},
    "docs/xgboost.md": FEW_ROUNDS,
}
"""Replacements in pages that make their blocks run with less work."""

OTHER_TESTS = {
    "docs/cli.md": "tests/cli",
    "docs/launch.md": "tests/launch",
    "docs/operations/exit-codes.md": "tests/launch/test_exit.py",
    "docs/operations/kubernetes.md": "tests/operations/test_kubernetes.py",
    "docs/operations/monitoring.md": "tests/train/history/test_measurements.py",
    "docs/operations/slurm.md": "tests/operations/test_slurm.py",
    "docs/operations/storage.md": "tests/operations/test_storage.py",
    "docs/quickstart.md": "tests/test_examples.py",
    "docs/trackers.md": "tests/trackers",
    "docs/tune.md": "tests/tune",
    "docs/ui.md": "tests/ui",
    "docs/writing-an-integration.md": "tests/train/test_writing_an_integration.py",
}
"""Pages with parts of scripts that other tests run completely. Their blocks are compiled here."""


COMPLETE = ("README.md", "docs/index.md")
"""Pages whose blocks are complete scripts, and whose commands run in a checkout."""


class Block(NamedTuple):
    """A code block of a page: line number, title, and code."""

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


PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
INSTALLS = re.compile(r'pip install (?:"\.\[([a-z,]+)\]")?((?: ?[a-z][a-z-]+)*)')
EXTRAS = re.compile(r"\[extra\]\([^)]*\)\s`([a-z]+)`")
PAGES = sorted(
    page
    for page in ["README.md", *(str(p.relative_to(REPO)) for p in (REPO / "docs").rglob("*.md"))]
    if any(blocks_of(page))
)


@pytest.mark.parametrize("page", PAGES)
def test_docs_blocks_compile_and_have_a_test(page: str) -> None:
    for block in blocks_of(page):
        compile(block.code, page, "exec")
    assert [page in GIVEN, page in OTHER_TESTS, page in COMPLETE].count(True) == 1


def installed_by(requirements: Iterable[str]) -> set[str]:
    """The distributions that pip brings for these, with all that they need."""
    found: set[str] = set()
    left = list(requirements)
    while left:
        wanted = Requirement(left.pop())
        if wanted.name == "drawbar":
            for extra in wanted.extras:
                left += PROJECT["optional-dependencies"][extra]
        elif wanted.name.lower() not in found:
            found.add(wanted.name.lower())
            left += list_requirements(wanted.name)
    return found


@functools.cache
def list_requirements(distribution: str) -> list[str]:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return [each for each in metadata.requires(distribution) or () if needed(each)]
    return []


find_distributions = functools.cache(metadata.packages_distributions)


def needed(requirement: str) -> bool:
    marker = Requirement(requirement).marker
    return marker is None or marker.evaluate({"extra": ""})


def modules_of(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module).partition(".")[0]


INSTALLING = [
    page
    for page in PAGES
    if INSTALLS.search(text := (REPO / page).read_text()) or EXTRAS.search(text)
]


@pytest.mark.parametrize("page", INSTALLING)
def test_docs_installation_line_covers_imports_of_the_page(page: str) -> None:
    text = (REPO / page).read_text()
    lines = INSTALLS.findall(text)
    names = [extras for extras, _ in lines if extras] + EXTRAS.findall(text)
    extras = [f"drawbar[{extras}]" for extras in names]
    besides = [each for _, others in lines for each in others.split()]
    brought = installed_by([*PROJECT["dependencies"], *extras, *besides])
    homes = find_distributions()
    imported = {name for block in blocks_of(page) for name in modules_of(block.code)}
    # Aim is the example of a tool that Drawbar does not install.
    foreign = imported - set(sys.stdlib_module_names) - {"drawbar", "aim"}
    missing = [n for n in foreign if not {home.lower() for home in homes.get(n, ())} & brought]
    assert missing == []


def test_docs_installation_commands_work_before_the_first_release() -> None:
    """Until then, only a checkout can be installed; `quickstart.md#install` explains this once."""
    is_released = re.search(r"^## \[\d", (REPO / "CHANGELOG.md").read_text(), re.M)
    assert not is_released, "Replace .[EXTRA] with drawbar[EXTRA] in the pages, and here."
    pages = [*(REPO / "docs").rglob("*.md"), *(REPO / "docs").rglob("*.ipynb"), REPO / "README.md"]
    for page in pages:
        assert re.findall(r'pip install [\\"\']*drawbar\b.*', page.read_text()) == [], page


def test_docs_quickstart_matches_the_example() -> None:
    (block,) = blocks_of("docs/quickstart.md")
    assert block.code.strip() == (REPO / "examples" / "quickstart.py").read_text().strip()


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of frameworks
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.nightly) for page in GIVEN],
)
def test_docs_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = Path("~/.cache").expanduser()
    monkeypatch.setenv("HOME", str(tmp_path))  # with the default storage path
    (tmp_path / ".cache").symlink_to(cache)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        exec(textwrap.dedent(GIVEN[page]), vars(module))
        for block in blocks_of(page):
            if block.title not in ELSEWHERE:
                run(compile(smaller(block.code, page), page, "exec"), block, module, tmp_path)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
        if page == "docs/lightning.md":  # it selects the other package
            set_lightning_package("lightning")


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("page", COMPLETE)
def test_docs_blocks_and_commands_of_first_pages_run_unchanged(page: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "DRAWBAR_STORAGE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": str(tmp_path),  # `drawbar launch` finds no Ray cluster
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    commands = re.findall(r"^    drawbar launch .*", (REPO / page).read_text(), re.M)
    script = tmp_path / "script.py"
    for block in blocks_of(page):
        script.write_text(block.code)
        commands.append(f"RAY_ADDRESS={ray.get_runtime_context().gcs_address} python {script}")
    for command in commands:
        output = subprocess.check_output(command, shell=True, cwd=REPO, env=environment, text=True)
        assert "loss" in output
    assert sorted(tmp_path.glob("*/journal.json*"))  # in the default storage path


def smaller(code: str, page: str) -> str:
    for written, instead in SMALLER.get(page, {}).items():
        assert written in (REPO / page).read_text()
        code = code.replace(written, instead)
    return code


def run(code: Any, block: Block, module: types.ModuleType, folder: Path) -> None:
    if block.title == IN_THE_FUNCTION:

        def function() -> None:
            with train.checkpoint_dir() as path:
                exec(code, {"path": path, **vars(module)})

        TorchTrainer(
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
